#!/bin/sh
# Installs what `make build` made, or removes it again: one list for both.
#
#     install.sh install|uninstall STAGED
#
# STAGED is the folder of built files. The places come from the environment, as the Makefile sets
# them: DESTDIR, PREFIX, BINDIR, LIBDIR, INCLUDEDIR, DATADIR, MANDIR; so do VERSION and ABI. With
# STRIP set, what is built is installed without debugging information.
set -eu
verb=$1
staged=$2
soname=libvbar.so.$ABI
library=$soname.$VERSION
rendered=$(mktemp -d)
trap 'rm -rf "$rendered"' EXIT

# A file: MODE SOURCE TARGET.
file() {
    case $verb in
    install) install -D -m "$1" "$2" "$DESTDIR$3" ;;
    uninstall) rm -f "$DESTDIR$3" ;;
    esac
}

# A file that was built, which may have debugging information.
built() {
    file "$@"
    if [ "$verb" = install ] && [ -n "${STRIP-}" ]; then strip --strip-debug "$DESTDIR$3"; fi
}

# A symbolic link: TARGET NAME.
link() {
    case $verb in
    install) ln -sf "$1" "$DESTDIR$2" ;;
    uninstall) rm -f "$DESTDIR$2" ;;
    esac
}

# A folder of our own, which goes when it is empty.
folder() {
    if [ "$verb" = uninstall ] && [ -d "$DESTDIR$1" ]; then
        rmdir --ignore-fail-on-non-empty "$DESTDIR$1"
    fi
}

# The way from a folder up to the prefix, `../..`; nothing for a folder outside of it.
up_to_prefix() {
    case $1 in
    "$PREFIX"/*) printf '%s' "${1#"$PREFIX"/}" | sed 's,[^/][^/]*,..,g' ;;
    esac
}

# A place as seen from a folder: FOLDER PLACE [WORD], below the word where both are in the prefix.
seen_from() {
    up=$(up_to_prefix "$1")
    if [ -n "$up" ] && [ -n "$(up_to_prefix "$2")" ]; then
        printf '%s' "${3:-$up}/${2#"$PREFIX"/}"
    else
        printf '%s' "$2"
    fi
}

# A template with its words put in.
render() {
    if [ "$verb" = uninstall ]; then return; fi
    sed -e "s|@VERSION@|$VERSION|g" -e "s|@ABI@|$ABI|g" \
        -e "s|@SONAME@|$soname|g" -e "s|@LIBRARY@|$library|g" \
        -e "s|@PC_PREFIX@|$pc_prefix|g" \
        -e "s|@PC_LIBDIR@|$(seen_from "$pkgconfig" "$LIBDIR" '${prefix}')|g" \
        -e "s|@PC_INCLUDEDIR@|$(seen_from "$pkgconfig" "$INCLUDEDIR" '${prefix}')|g" \
        -e "s|@CMAKE_LIBDIR@|$(seen_from "$cmake" "$LIBDIR")|g" \
        -e "s|@CMAKE_INCLUDEDIR@|$(seen_from "$cmake" "$INCLUDEDIR")|g" \
        -e "s|@NATIVE_LIBS@|$native|g" \
        -e "s|@CMAKE_NATIVE_LIBS@|$(printf '%s' "$native" | sed 's,-l,,g; s, ,;,g')|g" \
        "packaging/$1.in" >"$rendered/$1"
}

pkgconfig=$LIBDIR/pkgconfig
cmake=$LIBDIR/cmake/vbar
doc=$DATADIR/doc/vbar
up=$(up_to_prefix "$pkgconfig")
pc_prefix=${up:+\$\{pcfiledir\}/$up}
pc_prefix=${pc_prefix:-$PREFIX}
native=
if [ "$verb" = install ]; then native=$(cat "$staged/native-static-libs"); fi

built 755 "$staged/vbar" "$BINDIR/vbar"
built 755 "$staged/libvbar.so" "$LIBDIR/$library"
link "$library" "$LIBDIR/$soname"
link "$soname" "$LIBDIR/libvbar.so"
built 644 "$staged/libvbar.a" "$LIBDIR/libvbar.a"
for header in include/*.h*; do
    file 644 "$header" "$INCLUDEDIR/${header#include/}"
done
render vbar.pc
file 644 "$rendered/vbar.pc" "$pkgconfig/vbar.pc"
for part in vbarConfig.cmake vbarConfigVersion.cmake; do
    render "$part"
    file 644 "$rendered/$part" "$cmake/$part"
done
folder "$cmake"
file 644 "$staged/vbar.1" "$MANDIR/man1/vbar.1"
file 644 "$staged/completions/bash" "$DATADIR/bash-completion/completions/vbar"
file 644 "$staged/completions/zsh" "$DATADIR/zsh/site-functions/_vbar"
file 644 "$staged/completions/fish" "$DATADIR/fish/vendor_completions.d/vbar.fish"
for text in README.md CHANGELOG.md LICENSE-APACHE LICENSE-MIT; do
    file 644 "$text" "$doc/$text"
done
folder "$doc"

# Whether ldconfig looks into the folder of libraries: one of the system's, or one that its
# configuration names.
is_systems() {
    case $LIBDIR in
    /lib | /lib64 | /usr/lib | /usr/lib64) return 0 ;;
    esac
    cat /etc/ld.so.conf /etc/ld.so.conf.d/*.conf 2>/dev/null |
        sed 's/#.*//; s/[[:space:]]//g; s,/*$,,' | grep -Fqx -- "$LIBDIR"
}

if [ "$verb" = install ] && [ -z "$DESTDIR" ]; then
    echo "vbar $VERSION is in $PREFIX."
    if is_systems; then
        echo "Run ldconfig as root, so that programs find $soname."
    else
        echo "Programs find $soname with LD_LIBRARY_PATH=$LIBDIR, or linked with" \
            "-Wl,-rpath,$LIBDIR."
    fi
fi
