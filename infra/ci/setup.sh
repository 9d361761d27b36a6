# Sourced by the scripts beside this one: brings uv, the locked environment, and a browser.

# The environment's uv if there is one, else one that pip installs.
if ! command -v uv >/dev/null; then
  if python3 -m uv --version >/dev/null 2>&1 || python3 -m pip install --quiet uv; then
    uv() { python3 -m uv "$@"; }
  else
    # A Python that its distribution manages refuses pip; a virtual environment does not.
    python3 -m venv "${TMPDIR:-/tmp}/nmoe-uv"
    "${TMPDIR:-/tmp}/nmoe-uv/bin/pip" install --quiet uv
    PATH="${TMPDIR:-/tmp}/nmoe-uv/bin:$PATH"
  fi
fi

# Installs Chromium for the dashboard's tests where apt can; elsewhere those tests say what to do.
install_browser() {
  if [ -n "${NMOE_CHROMIUM:-}" ] || command -v chromium chromium-browser google-chrome >/dev/null; then
    return
  fi
  if command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium >/dev/null
  else
    echo "no Chromium here: the browser tests will fail until it is installed or NMOE_CHROMIUM names one" >&2
  fi
}

sync_environment() {
  uv sync --quiet --all-packages --all-extras
}
