//! Which pages each tensor will be on when the model is bound, and the sign of a page in a drawing.
//!
//! Pure but for the model it reads the table from; the places are those that the library gives the
//! tensors, computed by the same function.

use serde::Serialize;
use vbar::host::model_files::Model;
use vbar::model::binding::lay_out;
use vbar::units::{PageSize, format_bytes};
use vbar::{Error, ErrorCode, Result};

/// Where a tensor lies in the VBAR of its model.
#[derive(Serialize, Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Place {
    /// Its first byte, from the start of the VBAR.
    pub(super) vbar_offset: u64,
    /// Its first page; that of its offset where it has no bytes.
    pub(super) first_page: u64,
    /// Pages that it touches; 0 where it has no bytes.
    pub(super) page_count: u64,
}

/// The pages of a model, and what of them holds no weights.
#[derive(Serialize, Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct PageTotals {
    pub(super) page_bytes: u64,
    pub(super) page_count: u64,
    /// Pages with more than one tensor.
    pub(super) shared_page_count: u64,
    /// All pages together.
    pub(super) total_bytes: u64,
    /// What of them is no weight: the sum of the following.
    pub(super) lost_bytes: u64,
    /// Left out so that a tensor begins with a page.
    pub(super) skipped_bytes: u64,
    /// Left out between tensors for the alignment of the next.
    pub(super) alignment_bytes: u64,
    /// Behind the last tensor.
    pub(super) tail_bytes: u64,
}

/// What stands for one page, or for several in a row.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Sign {
    /// No tensor.
    Empty,
    /// The tensor of that index alone.
    One(usize),
    /// So many tensors.
    Several(usize),
}

/// The places of a model's tensors, in their order, and what they come to.
pub(super) fn lay_out_on_pages(
    model: &Model,
    page_size: PageSize,
) -> Result<(Vec<Place>, PageTotals)> {
    let layout = lay_out(&model.layout_items(), page_size, 0)?;
    let page_bytes = page_size.bytes();
    let page_count = page_size.pages_for(layout.end);
    if u32::try_from(page_count).is_err() {
        let text = format!(
            "--page-size {}: {page_count} pages, more than a VBAR can have; use larger ones",
            format_bytes(page_bytes)
        );
        return Err(Error::new(ErrorCode::InvalidArgument, text));
    }
    let places: Vec<Place> = layout
        .places
        .iter()
        .map(|place| {
            let first_page = place.start / page_bytes;
            let end_page =
                if place.is_empty() { first_page } else { page_size.pages_for(place.end) };
            Place { vbar_offset: place.start, first_page, page_count: end_page - first_page }
        })
        .collect();
    let total_bytes = page_count * page_bytes;
    let totals = PageTotals {
        page_bytes,
        page_count,
        shared_page_count: shared_pages(&places),
        total_bytes,
        lost_bytes: total_bytes - model.total_bytes(),
        skipped_bytes: layout.skipped_bytes,
        alignment_bytes: layout.end - model.total_bytes() - layout.skipped_bytes,
        tail_bytes: total_bytes - layout.end,
    };
    Ok((places, totals))
}

impl Place {
    fn end_page(&self) -> u64 {
        self.first_page + self.page_count
    }

    /// `3`, `3-7`, or `-` for a tensor without bytes.
    pub(super) fn pages(&self) -> String {
        match self.page_count {
            0 => "-".to_owned(),
            1 => self.first_page.to_string(),
            _ => format!("{}-{}", self.first_page, self.end_page() - 1),
        }
    }
}

/// Only a page on which a tensor ends can have two, as places rise.
fn shared_pages(places: &[Place]) -> u64 {
    let mut last_shared = None;
    let mut count = 0;
    let filled: Vec<&Place> = places.iter().filter(|place| place.page_count > 0).collect();
    for pair in filled.windows(2) {
        let page = pair[1].first_page;
        if pair[0].end_page() > page && last_shared != Some(page) {
            (last_shared, count) = (Some(page), count + 1);
        }
    }
    count
}

/// The signs of all pages, each for `pages_a_sign` of them. Places rise.
pub(super) fn signs(places: &[Place], page_count: u64, pages_a_sign: u64) -> Vec<Sign> {
    let mut rest = places;
    let sign = |number: u64| {
        let (start, end) = (number * pages_a_sign, (number + 1) * pages_a_sign);
        let gone = |place: &Place| place.page_count == 0 || place.end_page() <= start;
        while let Some((first, others)) = rest.split_first()
            && gone(first)
        {
            rest = others;
        }
        let here = rest.iter().take_while(|place| place.first_page < end);
        match here.filter(|place| !gone(place)).count() {
            0 => Sign::Empty,
            1 => Sign::One(places.len() - rest.len()),
            count => Sign::Several(count),
        }
    };
    (0..page_count.div_ceil(pages_a_sign)).map(sign).collect()
}

impl Sign {
    /// Its character.
    pub(super) fn character(self) -> char {
        match self {
            Self::Empty => '.',
            Self::One(tensor) => letter(tensor),
            Self::Several(count @ 2..=9) => char::from(b'0' + count as u8),
            Self::Several(_) => '+',
        }
    }
}

/// The letter of a tensor by its index: a to z, again and again.
pub(super) fn letter(tensor: usize) -> char {
    char::from(b'a' + (tensor % 26) as u8)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(first_page: u64, page_count: u64) -> Place {
        Place { vbar_offset: 0, first_page, page_count }
    }

    #[track_caller]
    fn check(places: &[Place], page_count: u64, pages_a_sign: u64, expected: &str) {
        let signs = signs(places, page_count, pages_a_sign);
        assert_eq!(signs.into_iter().map(Sign::character).collect::<String>(), expected);
    }

    #[test]
    fn a_page_shows_its_tensor_or_how_many_it_has() {
        // Three pages of a; b and c share one, d begins there too; e has no bytes; f is alone.
        let places = [place(0, 3), place(3, 1), place(3, 1), place(3, 2), place(5, 0), place(6, 1)];
        check(&places, 8, 1, "aaa3d.f.");
        check(&places, 8, 2, "a4df"); // pages 2 and 3: a, b, c, d
        check(&places, 8, 8, "5");
        check(&[], 0, 1, "");
        assert_eq!(shared_pages(&places), 1);
        let many = vec![place(0, 1); 12];
        check(&many, 1, 1, "+");
        check(&many[..9], 1, 1, "9");
        assert_eq!((shared_pages(&many), letter(27)), (1, 'b'));
    }

    #[test]
    fn a_tensor_names_its_pages() {
        assert_eq!(place(3, 0).pages(), "-");
        assert_eq!(place(3, 1).pages(), "3");
        assert_eq!(place(3, 4).pages(), "3-6");
    }
}
