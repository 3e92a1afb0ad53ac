//! Every byte of every tensor is found once, wherever the pages are cut.

use proptest::prelude::*;

use super::*;
use crate::units::MIB;

fn item(bytes: u64, source_offset: u64) -> LayoutItem<'static> {
    LayoutItem { name: "w", bytes, file: 0, source_offset, alignment: 1 }
}

fn page(bytes: u64) -> PageSize {
    PageSize::new(bytes).unwrap()
}

/// Lays out sizes that lie one behind the other in the file; the places' starts.
fn check_starts(sizes: &[u64], page_bytes: u64, wanted: &[u64]) -> Layout {
    let mut source = 0;
    let items: Vec<_> = sizes
        .iter()
        .map(|bytes| {
            source += bytes;
            item(*bytes, source - bytes)
        })
        .collect();
    let layout = lay_out(&items, page(page_bytes), 0).unwrap();
    let starts: Vec<u64> = layout.places.iter().map(|place| place.start).collect();
    assert_eq!(starts, wanted);
    layout
}

#[test]
fn small_tensors_share_a_page_and_neighbours_are_joined() {
    let layout = check_starts(&[1024, 512, 100, 0, 7], 1 << 16, &[0, 1024, 1536, 2048, 2048]);
    assert_eq!(layout.end, 2055);
    let joined: Vec<_> = layout.binding.segments().iter().map(|s| s.target.clone()).collect();
    assert_eq!(joined, [0..1636, 2048..2055]);
    assert_eq!(layout.binding.bound_bytes(), 1643);
}

#[test]
fn a_tensor_that_just_fits_a_page_gets_it() {
    let mib = MIB;
    let most = 16 * mib - 256 * 1024;
    // Pages of 16 MiB: little is skipped to reach the next one, half a page is not.
    check_starts(&[most, most, 8 * mib, most], 16 * mib, &[0, 16 * mib, 32 * mib, 40 * mib]);
    // One of more than a page does not touch three where two would do.
    check_starts(&[most, 20 * mib], 16 * mib, &[0, 16 * mib]);
    // Nothing is gained: it needs two pages anyway; it is small.
    check_starts(&[4 * mib, 20 * mib], 16 * mib, &[0, 4 * mib]);
    check_starts(&[most, mib], 16 * mib, &[0, most]);
}

#[test]
fn ranges_are_bound_once() {
    let mut binding = Binding::new();
    binding.bind(100..200, 0, 1000, 100).unwrap();
    binding.bind(300..301, 1, u64::MAX - 1, 1).unwrap();
    binding.bind(200..300, 1, 0, 100).unwrap();
    binding.bind(150..150, 1, 0, 0).unwrap();
    for overlapping in [100..200, 0..101, 199..200, 150..350, 0..400, 300..u64::MAX] {
        let bytes = overlapping.end - overlapping.start;
        let error = binding.bind(overlapping.clone(), 0, 0, bytes).unwrap_err();
        assert_eq!(error.code(), ErrorCode::InvalidArgument);
        assert!(error.to_string().contains("overlaps"), "{error}");
    }
    #[expect(clippy::reversed_empty_ranges, reason = "what is to be refused")]
    for (target, offset, bytes) in
        [(20..10, 0, 0), (0..10, 0, 9), (0..10, u64::MAX - 9, 10), (0..0, 1, u64::MAX)]
    {
        let error = binding.bind(target, 0, offset, bytes).unwrap_err();
        assert_eq!(error.code(), ErrorCode::InvalidArgument);
    }
    assert_eq!(binding.segments().len(), 3);
    let parts = binding.segments_of(150..250);
    assert_eq!(parts.len(), 2);
    assert_eq!((parts[0].target.clone(), parts[0].source_offset), (150..200, 1050));
    assert_eq!((parts[1].target.clone(), parts[1].source_offset), (200..250, 0));
    assert!(binding.segments_of(0..100).is_empty() && binding.segments_of(150..150).is_empty());
    assert_eq!(binding.segments_of(0..u64::MAX), binding.segments());
}

#[test]
fn sizes_near_2_to_64_are_refused() {
    let code = |items: &[LayoutItem<'_>], start| {
        let error = lay_out(items, PageSize::DEFAULT, start).unwrap_err();
        assert!(error.to_string().contains("'w'"), "{error}");
        error.code()
    };
    assert_eq!(code(&[item(u64::MAX, 1)], 0), ErrorCode::InvalidArgument);
    assert_eq!(code(&[item(u64::MAX, 0)], 1), ErrorCode::NoAddresses);
    assert_eq!(code(&[item(1, 0)], u64::MAX), ErrorCode::NoAddresses);
    assert_eq!(code(&[item(1 << 63, 0), item(1 << 63, 0)], 0), ErrorCode::NoAddresses);
    assert_eq!(code(&[LayoutItem { alignment: 3, ..item(1, 0) }], 0), ErrorCode::InvalidArgument);
    assert_eq!(code(&[LayoutItem { alignment: 0, ..item(1, 0) }], 0), ErrorCode::InvalidArgument);
    // The last bytes can be used, also when skipping to a page boundary would leave them.
    let last = u64::MAX - 511;
    assert_eq!(lay_out(&[item(511, 0)], PageSize::DEFAULT, last).unwrap().end, u64::MAX);
}

/// Sizes around those where the rule turns, in files of their own order.
fn any_items() -> impl Strategy<Value = Vec<LayoutItem<'static>>> {
    let size = prop_oneof![
        1 => Just(0u64),
        2 => 1..2000u64,
        2 => (0..20u64).prop_map(|count| count * 512),
        3 => 3500..4200u64,
        2 => 8000..70_000u64,
    ];
    let one = (size, 0..3usize, 0..1_000_000u64, 0..15u32, any::<bool>());
    prop::collection::vec(one, 0..40).prop_map(|parts| {
        let mut next = [0; 3];
        let mut items = Vec::new();
        for (bytes, file, gap, alignment, adjacent) in parts {
            let source_offset = next[file] + if adjacent { 0 } else { gap };
            next[file] = source_offset + bytes;
            let alignment = if alignment < 14 { 1 << (alignment / 2) } else { 1 << alignment };
            items.push(LayoutItem { bytes, file, source_offset, alignment, ..item(0, 0) });
        }
        items
    })
}

proptest! {
    #[test]
    fn every_byte_is_found_once(items in any_items(), cut in 1..9000u64, start in 0..5000u64) {
        let layout = lay_out(&items, page(4096), start).unwrap();
        prop_assert!(layout.binding.is_valid());
        prop_assert_eq!(layout.places.len(), items.len());
        let bytes: u64 = items.iter().map(|item| item.bytes).sum();
        prop_assert_eq!(layout.binding.bound_bytes(), bytes);

        // Whatever the ranges asked for, together they give the whole binding.
        let mut parts = Vec::new();
        let mut position = 0;
        while position < layout.end {
            for part in layout.binding.segments_of(position..position + cut) {
                prop_assert!(part.target.start >= position && part.target.end <= position + cut);
                parts.push(part);
            }
            position += cut;
        }
        let mut whole = Binding::new();
        for part in parts {
            whole.append(part);
        }
        prop_assert_eq!(&whole, &layout.binding);

        // Each tensor's place has its own bytes, in order, without a gap.
        for (item, place) in items.iter().zip(&layout.places) {
            prop_assert_eq!(place.end - place.start, item.bytes);
            let (mut target, mut source) = (place.start, item.source_offset);
            for part in layout.binding.segments_of(place.clone()) {
                prop_assert_eq!((part.target.start, part.source_offset), (target, source));
                prop_assert_eq!(part.file, item.file);
                (target, source) = (part.target.end, source + part.bytes());
            }
            prop_assert_eq!(target, place.end);
        }
    }

    #[test]
    fn places_rise_aligned_and_with_little_waste(items in any_items(), start in 0..5000u64) {
        let layout = lay_out(&items, page(4096), start).unwrap();
        let (mut end, mut bytes, mut padding) = (start, 0, 0);
        for (item, place) in items.iter().zip(&layout.places) {
            let alignment = item.alignment.max(TENSOR_ALIGNMENT);
            prop_assert_eq!(place.start % alignment, 0);
            prop_assert!(place.start >= end);
            end = place.end;
            bytes += item.bytes;
            padding += alignment - 1;
        }
        prop_assert_eq!(layout.end, end);
        prop_assert!(layout.skipped_bytes * 100 <= bytes * SKIPPED_PERCENT_MAX);
        prop_assert!(layout.end - start <= bytes + padding + layout.skipped_bytes);
    }

    #[test]
    fn bound_ranges_never_overlap(ranges in prop::collection::vec((0..300u64, 0..40u64), 0..30)) {
        let mut binding = Binding::new();
        let mut bytes_bound = [false; 400];
        for (start, bytes) in ranges {
            let covered = &mut bytes_bound[start as usize..(start + bytes) as usize];
            let free = covered.iter().all(|bound| !bound);
            let bound = binding.bind(start..start + bytes, 0, start, bytes);
            prop_assert_eq!(bound.is_ok(), free);
            if free {
                covered.fill(true);
            }
            prop_assert!(binding.is_valid());
        }
        let count = bytes_bound.iter().filter(|bound| **bound).count();
        prop_assert_eq!(binding.bound_bytes(), count as u64);
    }
}
