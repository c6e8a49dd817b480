#!/bin/sh
# The compiler launcher: ccache with what precompiled headers need, and with paths relative to the source folder, so
# that a second clone finds the results of the first. (Tools that read compile_commands.json skip a launcher by the name
# ccache; that is why this is a script and not "env CCACHE_...=... ccache".)
CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime
CCACHE_BASEDIR=$(cd "$(dirname "$0")/.." && pwd)
CCACHE_ABSSTDERR=1   # messages keep full paths
export CCACHE_SLOPPINESS CCACHE_BASEDIR CCACHE_ABSSTDERR
exec ccache "$@"
