#!/bin/sh
# As root, on a device: a key, a user and a unit, which is started. Prints the public key, for an
# operator to register; until then the unit tries again every 30 s. Arguments are the node config.
# PORT=9095 before it makes another node of the same machine. Once more it keeps the key.
set -eu
cd "$(dirname "$0")"
port=${PORT:-9094}
key=/etc/flower/private/node-$port.key
test -x /opt/fedstale/bin/fedstale || { echo "expected fedstale in /opt/fedstale: docs/deploy.md" >&2; exit 1; }
id flower-node >/dev/null 2>&1 || useradd --system --user-group flower-node
install -d -m 755 /etc/flower
install -d -m 700 /etc/flower/private
install -m 644 ca.crt /etc/flower
test -f "$key" || ssh-keygen -q -t ecdsa -b 384 -N "" -f "$key"
printf 'SUPERLINK=superlink.example.org:8000\nNODE_CONFIG="%s"\n' "$*" >"/etc/flower/node-$port.env"
install -m 644 flower-supernode@.service /etc/systemd/system
systemctl daemon-reload
systemctl enable --now "flower-supernode@$port"
cat "$key.pub"
