#!/usr/bin/env bash
# Fails when a committed file names a package registry's host; reads the commit, since uv fills the
# addresses into the working copy of uv.lock. The names are spelt so that this file holds none.
set -euo pipefail
cd "$(dirname "$0")/../.."
hosts='pyp[i]\.org|pythonhost[e]d\.org|npm[j]s\.(org|com)|(deb|security)\.debia[n]\.org'
if git grep -IlE "$hosts" HEAD -- .; then
  echo "these committed files name a registry's host; 'make setup' installs the filter for uv.lock" >&2
  exit 1
fi
