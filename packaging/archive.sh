#!/bin/sh
# Makes the archive that is installed of the one that rustc makes: one object whose only global
# symbols are the library's functions.
#
# rustc's archive has Rust's standard library in it, with global symbols. A program that links a
# second archive made by Rust, of another version or built with other options, would have those
# twice. What is not ours to export becomes local here, and groups of sections, of which a linker
# keeps one by name, become plain sections.
#
#     archive.sh SOURCE TARGET
set -eu
source=$1
target=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

ld -r --force-group-allocation --whole-archive "$source" -o "$work/all.o"
# Without the bitcode that Rust's own libraries carry for link-time optimisation: no linker can read
# what is left of it, and tools that have LLVM's plug-in stop at it.
objcopy --remove-section .llvmbc --remove-section .llvmcmd \
    --wildcard --keep-global-symbol='vbar_*' "$work/all.o" "$work/vbar.o"
rm -f "$target"
ar rcs "$target" "$work/vbar.o"
