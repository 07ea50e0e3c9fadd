#!/bin/sh
# As root, where runs are started from: a user and a unit for runs that are started again when they
# fail. Once more it changes nothing.
set -eu
cd "$(dirname "$0")"
test -x /opt/fedstale/bin/fedstale || { echo "expected fedstale in /opt/fedstale: docs/deploy.md" >&2; exit 1; }
id flower-operator >/dev/null 2>&1 || useradd --system --user-group flower-operator
FLWR_HOME=/var/lib/flower-operator sh install.sh
chown -R flower-operator:flower-operator /var/lib/flower-operator
install -d -m 755 /etc/flower
install -m 644 flower-run@.service /etc/systemd/system
systemctl daemon-reload
