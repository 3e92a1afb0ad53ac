//! The rule by which a model's tensors get their places in a VBAR.
//!
//! Load order is address order: places rise in the order of the items. Tensors are packed at their
//! alignment, so small ones share pages and the file's neighbours stay neighbours. One exception:
//! a tensor of at least an eighth of a page that would touch one page more than its size needs
//! (15 MiB that begin 2 MiB before a page's end) begins at the next page instead, as long as all
//! bytes skipped so far stay within [`SKIPPED_PERCENT_MAX`] of the bytes placed so far. So the
//! model never grows by more than that, its first layers do not use up what later ones need, and a
//! tensor that just fits a page does not take two away when it is used.

use super::{
    Binding, Encoding, Error, ErrorCode, Layout, LayoutItem, PageSize, Range, Result, Segment,
    TENSOR_ALIGNMENT, align_up, quoted,
};

/// Bytes skipped for the sake of page boundaries, in percent of the bytes placed, at every point.
pub const SKIPPED_PERCENT_MAX: u64 = 3;

/// Tensors below this part of a page are packed without a look at page boundaries.
const PACKED_BELOW_PART: u64 = 8;

/// Lays the items out, in their order, from `start` on (bytes from the start of the VBAR).
///
/// # Errors
/// `InvalidArgument`, naming the item: an alignment that is no power of two, or a source that ends
/// past 2^64. `NoAddresses`, naming the item: it would end past 2^64.
pub fn lay_out(items: &[LayoutItem<'_>], page: PageSize, start: u64) -> Result<Layout> {
    let mut layout = Layout {
        places: Vec::with_capacity(items.len()),
        binding: Binding::new(),
        end: start,
        skipped_bytes: 0,
    };
    let mut placed_bytes = 0u64;
    for item in items {
        check_item(item)?;
        let place = place_of(item, page, &mut layout, placed_bytes).ok_or_else(|| {
            let text = format!("{} bytes at {:#x} end past 2^64", item.bytes, layout.end);
            said_of(item, ErrorCode::NoAddresses, &text)
        })?;
        placed_bytes += item.bytes;
        layout.end = place.end;
        if item.bytes > 0 {
            layout.binding.append(Segment {
                target: place.clone(),
                file: item.file,
                source_offset: item.source_offset,
                encoding: Encoding::Raw,
            });
        }
        layout.places.push(place);
    }
    debug_assert!(layout.binding.is_valid());
    Ok(layout)
}

fn check_item(item: &LayoutItem<'_>) -> Result<()> {
    if !item.alignment.is_power_of_two() {
        let text = format!("alignment {} is no power of two", item.alignment);
        return Err(said_of(item, ErrorCode::InvalidArgument, &text));
    }
    if item.source_offset.checked_add(item.bytes).is_none() {
        let text = format!("{} bytes at {} end past 2^64", item.bytes, item.source_offset);
        return Err(said_of(item, ErrorCode::InvalidArgument, &text));
    }
    Ok(())
}

/// The item's place behind what is laid out already; counts what it skips. `None` past 2^64.
fn place_of(
    item: &LayoutItem<'_>,
    page: PageSize,
    layout: &mut Layout,
    placed_bytes: u64,
) -> Option<Range<u64>> {
    let alignment = item.alignment.max(TENSOR_ALIGNMENT);
    let packed = align_up(layout.end, alignment)?;
    let packed_end = packed.checked_add(item.bytes)?;
    if item.bytes < page.bytes() / PACKED_BELOW_PART {
        return Some(packed..packed_end);
    }
    let within_page = packed & (page.bytes() - 1);
    let touched = page.pages_for(within_page.checked_add(item.bytes)?);
    // An alignment of more than a page puts the next candidate further than a page away; then
    // `packed` is at a page boundary already, and nothing is to be gained.
    if touched == page.pages_for(item.bytes) {
        return Some(packed..packed_end);
    }
    let skipped = page.bytes() - within_page;
    let skipped_total = layout.skipped_bytes.checked_add(skipped)?;
    let placed_total = u128::from(placed_bytes) + u128::from(item.bytes);
    if u128::from(skipped_total) * 100 > placed_total * u128::from(SKIPPED_PERCENT_MAX) {
        return Some(packed..packed_end);
    }
    // Past 2^64 only by skipping: pack it.
    let moved = packed.checked_add(skipped)?;
    let Some(moved_end) = moved.checked_add(item.bytes) else {
        return Some(packed..packed_end);
    };
    layout.skipped_bytes = skipped_total;
    Some(moved..moved_end)
}

fn said_of(item: &LayoutItem<'_>, code: ErrorCode, text: &str) -> Error {
    Error::new(code, format!("tensor {}: {text}", quoted(item.name)))
}
