//! What an error says where it leaves the pager: what was asked, why it failed, how full it was.
//!
//! The steps below return what the driver or a file said; here, once and off every quick path, the
//! call that the program made is put before it (VBAR, pages, bytes), and behind it the bytes used,
//! the budget, and where that comes from. Decides nothing and changes no code.

use std::fmt;
use std::ops::Range;

use super::{Pager, Request};
use crate::error::{Error, ErrorCode};
use crate::memory::vbar::Bar;

/// Ranges of one request that a message names.
const RANGES_MAX: usize = 4;

/// Pages of a VBAR as a message names them: `page 3 of VBAR 2`, `pages 3..5 of VBAR 2`.
pub(super) struct PagesOf<'a>(pub(super) &'a Bar, pub(super) &'a Range<u32>);

impl fmt::Display for PagesOf<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(bar, pages) = self;
        match pages.len() {
            0 => write!(f, "no page of VBAR {}", bar.id),
            1 => write!(f, "page {} of VBAR {}", pages.start, bar.id),
            _ => write!(f, "pages {}..{} of VBAR {}", pages.start, pages.end, bar.id),
        }
    }
}

/// The pages of a request, the first ones by name, and their bytes.
struct Asked<'a> {
    requests: &'a [Request<'a>],
    page_bytes: u64,
}

impl fmt::Display for Asked<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { requests, page_bytes } = self;
        f.write_str("fault of ")?;
        for (index, request) in requests.iter().take(RANGES_MAX).enumerate() {
            let separator = if index > 0 { ", " } else { "" };
            write!(f, "{separator}{}", PagesOf(request.bar, &request.pages))?;
        }
        if requests.len() > RANGES_MAX {
            write!(f, " and {} more ranges", requests.len() - RANGES_MAX)?;
        }
        let pages: u64 = requests.iter().map(|request| request.pages.len() as u64).sum();
        write!(f, " ({} bytes)", pages.saturating_mul(*page_bytes))
    }
}

impl Pager {
    /// The error of a fault.
    #[cold]
    #[inline(never)]
    pub(super) fn fault_failed(&self, error: Error, requests: &[Request<'_>]) -> Error {
        self.told(error, Asked { requests, page_bytes: self.page_bytes() })
    }

    /// An error with the call that it ends, and with the state of the memory where that says more.
    #[cold]
    #[inline(never)]
    pub fn told(&self, error: Error, asked: impl fmt::Display) -> Error {
        let error = error.context(asked);
        match error.code() {
            // The caller's mistake, or nothing is to be looked at any more.
            ErrorCode::InvalidArgument
            | ErrorCode::Closed
            | ErrorCode::StaleHandle
            | ErrorCode::StaleToken
            | ErrorCode::ProcessEnding => error,
            _ => {
                let numbers = self.numbers();
                error.appended(format_args!(
                    "{} bytes used, budget {} bytes ({})",
                    numbers.used_bytes,
                    numbers.budget_bytes,
                    numbers.budget_source.words()
                ))
            }
        }
    }
}
