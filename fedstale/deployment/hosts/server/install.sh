#!/bin/sh
# As root, on the server: users, folders and units, which are started. Once more it changes nothing.
set -eu
cd "$(dirname "$0")"
test -x /opt/fedstale/bin/fedstale || { echo "expected fedstale in /opt/fedstale: docs/deploy.md" >&2; exit 1; }
test -x /usr/sbin/nginx || { echo "expected nginx: apt-get install nginx" >&2; exit 1; }
for user in flower flower-door flower-app; do
    id "$user" >/dev/null 2>&1 || useradd --system --user-group "$user"
done
install -d -m 700 -o flower-app -g flower-app /var/lib/flower-app
install -d -m 755 /etc/flower
install -d -m 700 /etc/flower/private
install -m 644 ca.crt /etc/flower
install -m 600 server.pem server.key superexec.secret nginx.conf /etc/flower/private
install -m 644 ./*.service /etc/systemd/system
systemctl daemon-reload
# Debian's own service is root's, and opens port 80. It stays where it serves more than its first page.
if test "$(find /etc/nginx/sites-enabled /etc/nginx/conf.d -mindepth 1)" = /etc/nginx/sites-enabled/default; then
    systemctl disable --now nginx
fi
systemctl enable --now flower-superlink flower-doors flower-superexec
waited=0
until test -S /run/flower-superlink/superlink.sock; do
    test "$waited" -lt 120 || { echo "the SuperLink does not start: journalctl --unit flower-superlink" >&2; exit 1; }
    sleep 1
    waited=$((waited + 1))
done
