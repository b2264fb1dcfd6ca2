#!/usr/bin/env bash
# Makes a Chromium available for the tests that look at the HTML report; does nothing if one is.
set -euo pipefail

for name in chromium chromium-browser google-chrome google-chrome-stable; do
  if path=$(command -v "$name"); then
    echo "browser: $path"
    exit 0
  fi
done
hint="tests/verify/test_browser.py skips without one, and fails where CI is set."
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
  echo "browser: none found. Install chromium or Google Chrome (only root on Debian can do it here); $hint" >&2
  exit 0
fi
export DEBIAN_FRONTEND=noninteractive
# The fonts, since a page without any shows no letters.
if apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core; then
  echo "browser: $(command -v chromium)"
else
  echo "browser: chromium could not be installed; $hint" >&2
fi
