//! `vbar inspect`: the drawing, and that its numbers are those of a bound model.

use vbar::host::model_files::Model;
use vbar::options::RuntimeOptions;

use crate::program::{json, lines, model, number, on_terminal, text, written_model};
use crate::world::{P, World, options};

const KIB: u64 = 1 << 10;

/// Five tensors on pages of 64 KiB: three and a half pages, two that share the rest of the fourth
/// with the beginning of the next, and one of nothing.
fn five() -> (tempfile::TempDir, std::path::PathBuf) {
    written_model(&[
        ("embed.weight", 224 * KIB),
        ("layers.0.norm", 1000),
        ("layers.0.scale", 700),
        ("layers.1.weight", 100 * KIB),
        ("layers.2.empty", 0),
    ])
}

fn shown(columns: u16, arguments: &[&str]) -> String {
    let shown = on_terminal(columns, arguments, &[("NO_COLOR", "1")]);
    assert_eq!(shown.code, Some(0));
    shown.check_fits(columns);
    assert!(!shown.raw.contains('\u{1b}'), "{}", shown.raw);
    shown.raw
}

#[test]
fn five_tensors_on_a_terminal_of_80_columns() {
    let (_folder, path) = five();
    let drawing = shown(80, &["inspect", text(&path), "--page-size", "64K"]);
    let (_, drawing) = drawing.split_once("\n\n").unwrap();
    let expected = "\
dtypes: tensors, bytes, share
  U8  5   325.7 KiB  100.0 %  ########################################

groups: tensors, bytes, share
  embed     1   224.0 KiB   68.8 %  ########################################
  layers.*  4   101.7 KiB   31.2 %  ##################

pages
  6 of 64.0 KiB, 384.0 KiB in all; 1 shared by several tensors
  58.3 KiB hold no weights (15.2 %): 348 B for alignment, 58.0 KiB behind the
  last tensor
  0 aaa4dd

tensors
  a 224.0 KiB  U8  [229376]  0-3  embed.weight
  b    1000 B  U8  [1000]      3  layers.0.norm
  c     700 B  U8  [700]       3  layers.0.scale
  d 100.0 KiB  U8  [102400]  3-5  layers.1.weight
  e       0 B  U8  [0]         -  layers.2.empty
";
    assert_eq!(drawing, expected);
}

#[test]
fn five_tensors_on_a_terminal_of_40_columns() {
    let (_folder, path) = five();
    let drawing = shown(40, &["inspect", text(&path), "--page-size", "64K"]);
    let (_, drawing) = drawing.split_once("\n\n").unwrap();
    let expected = "\
dtypes
  U8   325.7 KiB  ######################

groups
  embed      224.0 KiB  ################
  layers.*   101.7 KiB  #######

pages
  6 of 64.0 KiB, 384.0 KiB in all; 1
  shared by several tensors
  58.3 KiB hold no weights (15.2 %): 348
  B for alignment, 58.0 KiB behind the
  last tensor
  0 aaa4dd

tensors
  a embed.weight
    224.0 KiB, U8 [229376], pages 0-3
  b layers.0.norm
    1000 B, U8 [1000], page 3
  c layers.0.scale
    700 B, U8 [700], page 3
  d layers.1.weight
    100.0 KiB, U8 [102400], pages 3-5
  e layers.2.empty
    0 B, U8 [0], pages -
";
    assert_eq!(drawing, expected);
}

#[test]
fn three_hundred_tensors_are_cut_on_a_terminal_and_whole_elsewhere() {
    let names: Vec<String> =
        (0..300).map(|number| format!("layers.{}.part{}", number / 3, number % 3)).collect();
    let tensors: Vec<_> = names.iter().map(|name| (&**name, 40 * KIB)).collect();
    let (_folder, path) = written_model(&tensors);
    let arguments = ["inspect", text(&path), "--page-size", "4K"];
    for columns in [40, 80, 120] {
        let cut = shown(columns, &arguments);
        assert!(cut.contains("  and 268 more tensors; --all shows them\n"), "{cut}");
        assert!(!cut.contains("layers.11.part0"), "{cut}");
        assert!(cut.contains("; --all shows each\n"), "{cut}");
        assert!(cut.lines().count() < 120, "{cut}");
        let whole = shown(columns, &[&arguments[..], &["--all"]].concat());
        assert!(names.iter().all(|name| whole.contains(name)), "{whole}");
        let line = "\n  2970 llllllllll mmmmmmmmmm nnnnnnnnnn\n";
        assert_eq!(whole.contains(line), columns == 40, "{whole}");
    }
    let piped = lines(0, &arguments);
    assert!(names.iter().all(|name| piped.contains(name)), "{piped}");
    assert!(!piped.contains("--all shows them"), "{piped}");
}

#[test]
fn hostile_names_are_not_obeyed() {
    let (_folder, path) = written_model(&[("a\u{1b}[2Jb\nc", 10), ("\u{9b}31m", 10)]);
    for shown in [lines(0, &["inspect", text(&path)]), shown(40, &["inspect", text(&path)])] {
        assert!(shown.contains(r"a\u{1b}[2Jb\nc") && !shown.contains('\u{9b}'), "{shown}");
    }
    let report = json(0, &["inspect", text(&path), "--json"]);
    assert_eq!(report["tensors"][0]["name"], "a\u{1b}[2Jb\nc");
}

#[test]
fn an_empty_model_has_no_pages() {
    let (_folder, path) = written_model(&[]);
    let report = json(0, &["inspect", text(&path), "--json"]);
    assert_eq!(number(&report["pages"], "page_count"), 0);
    shown(40, &["inspect", text(&path)]);
}

#[test]
fn pages_that_no_vbar_could_have_are_refused() {
    // Sparse: 20 TiB of addresses, no block of them written.
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let path = folder.path().join("model.safetensors");
    let bytes = 20u64 << 40;
    let header =
        format!("{{\"w\":{{\"dtype\":\"U8\",\"shape\":[{bytes}],\"data_offsets\":[0,{bytes}]}}}}");
    let mut start = (header.len() as u64).to_le_bytes().to_vec();
    start.extend_from_slice(header.as_bytes());
    std::fs::write(&path, &start).unwrap();
    std::fs::File::options()
        .write(true)
        .open(&path)
        .unwrap()
        .set_len(start.len() as u64 + bytes)
        .unwrap();
    let report = json(2, &["inspect", text(&path), "--page-size", "4K", "--json"]);
    assert!(report["error"].as_str().unwrap().contains("use larger ones"), "{report}");
    assert_eq!(
        number(&json(0, &["inspect", text(&path), "--json"])["pages"], "page_count"),
        5 << 18
    );
}

/// The numbers are not the program's own: a bound model has the same.
#[test]
fn places_are_those_of_a_bound_model() {
    let (_folder, path) = model("4M");
    let report = json(0, &["inspect", text(&path), "--page-size", "64K", "--json"]);
    let world = World::with("capacity=64M,granularity=64K", RuntimeOptions { ..options() });
    let bar = world.runtime.bind_model(Model::open(&path).unwrap()).unwrap();
    let tensors = report["tensors"].as_array().unwrap();
    for (index, tensor) in tensors.iter().enumerate() {
        let place = bar.range(index);
        assert_eq!(number(tensor, "vbar_offset"), place.start, "{tensor}");
        assert_eq!(number(tensor, "first_page"), place.start / P);
        let pages = if place.is_empty() { 0 } else { place.end.div_ceil(P) - place.start / P };
        assert_eq!(number(tensor, "page_count"), pages, "{tensor}");
    }
    let pages = &report["pages"];
    let parts = ["skipped_bytes", "alignment_bytes", "tail_bytes"];
    let parts: u64 = parts.iter().map(|key| number(pages, key)).sum();
    assert_eq!(number(pages, "lost_bytes"), parts);
    assert_eq!(number(pages, "total_bytes"), number(&report, "model_bytes") + parts);
    assert_eq!(number(pages, "total_bytes"), number(pages, "page_count") * P);
    let sum = |key: &str| {
        let rows = report[key].as_array().unwrap().iter();
        rows.map(|row| (number(row, "tensor_count"), number(row, "tensor_bytes")))
            .fold((0, 0), |sum, row| (sum.0 + row.0, sum.1 + row.1))
    };
    let whole = (number(&report, "tensor_count"), number(&report, "model_bytes"));
    assert_eq!((sum("groups"), sum("files")), (whole, whole));
}
