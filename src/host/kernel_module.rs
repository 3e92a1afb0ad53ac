//! The version of the driver's kernel module, as the kernel tells it.
//!
//! The library that a program loads may be another one, in containers and beside compatibility
//! packages; what becomes of pages is the module's affair.

use crate::error::Result;
use crate::host::mounts::SystemRoot;

/// Older modules mark the pages of registered files as written when they are given back, so that a
/// model file may be written anew.
pub const REGISTRATION_MIN: u32 = 570;

/// `NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.57.02  Tue ...`, or `... Open Kernel
/// Module for x86_64  580.159.04  Release Build ...`: the first word of numbers and points. `None`
/// without a module.
///
/// # Errors
/// `Io` when the system's file is there and cannot be read.
pub fn module_version(root: &SystemRoot) -> Result<Option<String>> {
    let text = root.read("/proc/driver/nvidia/version")?.unwrap_or_default();
    let first = text.lines().find(|line| line.starts_with("NVRM version:")).unwrap_or_default();
    let is_version = |word: &&str| {
        word.contains('.') && word.chars().all(|sign| sign.is_ascii_digit() || sign == '.')
    };
    Ok(first.split_whitespace().find(is_version).map(str::to_owned))
}

/// Why a device with that may not have pages of files registered; `None` where it may.
#[must_use]
pub fn registration_refused(read_only: bool, module_version: Option<&str>) -> Option<String> {
    if !read_only {
        return Some("the device has no read-only registration".to_owned());
    }
    let major = module_version.and_then(|text| text.split('.').next()?.parse::<u32>().ok());
    match major {
        Some(major) if major >= REGISTRATION_MIN => None,
        Some(major) => Some(format!(
            "driver {major} may write file pages back; {REGISTRATION_MIN} and later do not"
        )),
        None => Some("the kernel module's version is not known".to_owned()),
    }
}
