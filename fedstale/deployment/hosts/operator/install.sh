#!/bin/sh
# As the operator: certificates and the connection "mine" beside Flower's config.toml. Once more it
# changes nothing.
set -eu
home=${FLWR_HOME:-$HOME/.flwr}
install -d -m 700 "$home"
home=$(cd "$home" && pwd)
cd "$(dirname "$0")"
install -m 600 ca.crt operator.pem "$home"
grep -qsxF '[superlink.mine]' "$home/config.toml" || cat >>"$home/config.toml" <<END

[superlink.mine]
address = "superlink.example.org:8001"
root-certificates = "$home/ca.crt"
client-certificate = "$home/operator.pem"
END
