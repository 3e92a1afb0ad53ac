//! Headers that are wrong in one place, and the format's own crate as the judge of random ones.

use proptest::prelude::*;

use super::*;

/// A whole file in memory.
fn parse_file(bytes: &[u8]) -> Result<Header> {
    let header_bytes = header_bytes("the file", bytes, bytes.len() as u64)?;
    let header = &bytes[PREFIX_BYTES as usize..][..header_bytes];
    parse_header("the file", header, bytes.len() as u64)
}

fn file_of(header: &[u8], data_bytes: usize) -> Vec<u8> {
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header);
    file.resize(file.len() + data_bytes, 0xA5);
    file
}

fn check_parses(header: &str, data_bytes: usize) -> Header {
    let file = file_of(header.as_bytes(), data_bytes);
    assert!(::safetensors::SafeTensors::deserialize(&file).is_ok(), "the crate refuses {header}");
    parse_file(&file).unwrap()
}

/// The header is refused with `Format`, by the crate too, and the text has all of `words`.
fn check_refused(header: &str, data_bytes: usize, words: &[&str]) {
    let file = file_of(header.as_bytes(), data_bytes);
    assert!(::safetensors::SafeTensors::deserialize(&file).is_err(), "the crate takes {header}");
    check_error(&parse_file(&file).unwrap_err(), words);
}

fn check_error(error: &Error, words: &[&str]) {
    assert_eq!(error.code(), ErrorCode::Format);
    let text = error.to_string();
    for word in words.iter().chain(&["the file"]) {
        assert!(text.contains(word), "no {word} in: {text}");
    }
}

fn tensor(name: &str, dtype: &str, shape: &str, start: u64, end: u64) -> String {
    format!(r#""{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{start},{end}]}}"#)
}

#[test]
fn a_header_is_read_in_the_order_of_its_data() {
    let header = format!(
        r#"{{{},"__metadata__":{{"format":"pt"}},{},{},{}}}"#,
        tensor("b", "BF16", "[2,3]", 4, 16),
        tensor("a", "F32", "[]", 0, 4),
        tensor("päd \\n 模", "F4", "[3,2]", 16, 19),
        tensor("none", "I64", "[0,7]", 4, 4)
    );
    let parsed = check_parses(&header, 19);
    let names: Vec<&str> = parsed.tensors.iter().map(|tensor| &*tensor.name).collect();
    assert_eq!(names, ["a", "none", "b", "päd \n 模"]);
    assert_eq!(parsed.data_offset, 8 + header.len() as u64);
    let data = parsed.data_offset;
    assert_eq!(parsed.tensors[2].extent, data + 4..data + 16);
    assert_eq!(*parsed.tensors[2].shape, [2, 3]);
    assert_eq!(parsed.tensors[3].dtype, Dtype::F4);
    assert_eq!(parsed.metadata["format"], "pt");
}

#[test]
fn every_dtype_has_its_size() {
    for (dtype, bits) in [
        ("BOOL", 8),
        ("F4", 4),
        ("F6_E2M3", 6),
        ("F6_E3M2", 6),
        ("U8", 8),
        ("I8", 8),
        ("F8_E5M2", 8),
        ("F8_E4M3", 8),
        ("F8_E8M0", 8),
        ("F8_E4M3FNUZ", 8),
        ("F8_E5M2FNUZ", 8),
        ("I16", 16),
        ("U16", 16),
        ("F16", 16),
        ("BF16", 16),
        ("I32", 32),
        ("U32", 32),
        ("F32", 32),
        ("C64", 64),
        ("F64", 64),
        ("I64", 64),
        ("U64", 64),
    ] {
        let header = format!("{{{}}}", tensor("w", dtype, "[4,3]", 0, bits * 12 / 8));
        let parsed = check_parses(&header, bits as usize * 12 / 8);
        assert_eq!(parsed.tensors[0].dtype.to_string(), dtype);
    }
}

#[test]
fn empty_and_padded_headers_are_read() {
    assert!(check_parses("{}", 0).tensors.is_empty());
    assert!(check_parses(" \t\n{} \r\n ", 0).tensors.is_empty());
    assert!(check_parses(r#"{"__metadata__":null}"#, 0).metadata.is_empty());
}

#[test]
fn wrong_tables_are_refused() {
    let one = |dtype, shape, start, end| format!("{{{}}}", tensor("w", dtype, shape, start, end));
    let two = |a: String, b: String| format!("{{{a},{b}}}");
    let first = || tensor("first", "U8", "[8]", 0, 8);

    check_refused(&one("U8", "[8]", 0, 8), 7, &["'w'", "ends at 8", "only 7"]);
    check_refused(&one("U8", "[8]", 0, 8), 9, &["'w'", "1 bytes follow"]);
    check_refused("{}", 9, &["9 bytes follow"]);
    check_refused(&one("F32", "[8]", 0, 8), 8, &["'w'", "has 32"]);
    check_refused(&one("U8", "[8]", 8, 0), 8, &["'w'", "before its start"]);
    check_refused(&one("F4", "[3]", 0, 1), 1, &["'w'", "12 bits"]);
    check_refused(&one("F6_E2M3", "[2]", 0, 2), 2, &["'w'", "12 bits"]);
    check_refused(&one("F9", "[8]", 0, 8), 8, &["'w'", "F9"]);
    check_refused(&one("U8", "[-8]", 0, 8), 8, &["'w'"]);
    check_refused(&one("U8", "[8.0]", 0, 8), 8, &["'w'"]);
    check_refused(&one("F32", "[4294967296,4294967296]", 0, 8), 8, &["'w'", "2^64"]);
    check_refused(&one("F32", "[4611686018427387904]", 0, 0), 0, &["'w'", "2^64"]);
    check_refused(&one("U8", "[8]", u64::MAX - 8, u64::MAX), 8, &["'w'", "hole"]);
    let overlapping = two(first(), tensor("w", "U8", "[8]", 4, 12));
    check_refused(&overlapping, 12, &["'w'", "'first'", "overlaps"]);
    let twice = two(first(), tensor("w", "U8", "[8]", 0, 8));
    check_refused(&twice, 8, &["'w'", "'first'", "overlaps"]);
    let apart = two(first(), tensor("w", "U8", "[8]", 9, 17));
    check_refused(&apart, 17, &["'w'", "hole of 1"]);
}

#[test]
fn wrong_json_is_refused() {
    for (header, words) in [
        ("", &[] as &[&str]),
        ("[]", &[]),
        ("{", &[]),
        ("{}{}", &[]),
        ("\u{feff}{}", &[]),
        (r#"{"w":1}"#, &["'w'"]),
        (r#"{"w":{"dtype":"U8","shape":[0]}}"#, &["'w'", "data_offsets"]),
        (r#"{"w":{"dtype":"U8","dtype":"U8","shape":[0],"data_offsets":[0,0]}}"#, &["'w'"]),
        (r#"{"__metadata__":{"a":1}}"#, &["__metadata__", "'a'"]),
        (r#"{"__metadata__":{},"__metadata__":{}}"#, &["__metadata__", "twice"]),
    ] {
        check_refused(header, 0, words);
    }
    let mut deep = r#"{"w":{"x":"#.to_owned();
    deep.push_str(&"[".repeat(100_000));
    check_refused(&deep, 0, &[]);
    let file = file_of(b"{\"w\xFF\":1}", 0);
    check_error(&parse_file(&file).unwrap_err(), &["UTF-8"]);
}

#[test]
fn names_that_occur_twice_are_refused() {
    let zero = |name| tensor(name, "U8", "[0]", 0, 0);
    for (header, name) in [
        (format!("{{{},{}}}", zero("w"), zero("w")), "'w'"),
        (format!("{{{},{}}}", zero("w"), zero("\\u0077")), "'w'"),
        (r#"{"__metadata__":{"k":"1","k":"2"}}"#.to_owned(), "'k'"),
    ] {
        let error = parse_file(&file_of(header.as_bytes(), 0)).unwrap_err();
        check_error(&error, &[name, "twice"]);
    }
}

#[test]
fn the_prefix_is_checked_before_anything_is_read() {
    for (bytes, words) in [
        (&b""[..], "too few"),
        (b"\x02\0\0\0\0\0\0", "too few"),
        (b"\x03\0\0\0\0\0\0\0{}", "does not fit"),
        (b"<html><body>", "not a safetensors file"),
        (b"\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF{}", "limit"),
    ] {
        check_error(&parse_file(bytes).unwrap_err(), &[words]);
    }
    let limit = HEADER_BYTES_MAX.to_le_bytes();
    assert_eq!(header_bytes("f", &limit, u64::MAX).unwrap() as u64, HEADER_BYTES_MAX);
    assert!(header_bytes("f", &(HEADER_BYTES_MAX + 1).to_le_bytes(), u64::MAX).is_err());
}

/// A valid file, and what is done to it: bytes replaced, put in, or taken out.
fn damaged_file() -> impl Strategy<Value = Vec<u8>> {
    let header = format!(
        r#"{{"__metadata__":{{"a":"b"}},{},{},{}}}"#,
        tensor("first", "F16", "[2,2]", 0, 8),
        tensor("second", "U8", "[16]", 8, 24),
        tensor("none", "F4", "[0]", 24, 24)
    );
    let file = file_of(header.as_bytes(), 24);
    let token = prop::sample::select(&b"0123456789-.e{}[]\",: \\uFU8\x00\xFF"[..]);
    let change = (0..file.len(), prop_oneof![2 => token, 1 => any::<u8>()], 0..3);
    prop::collection::vec(change, 0..4).prop_map(move |changes| {
        let mut file = file.clone();
        for (position, byte, kind) in changes {
            let position = position.min(file.len() - 1);
            match kind {
                0 => file[position] = byte,
                1 => file.insert(position, byte),
                _ => drop(file.remove(position)),
            }
        }
        // Most changes of length would only be caught at the prefix.
        if file[7] == 0 {
            let header_bytes = file.len() as u64 - 32;
            file[..8].copy_from_slice(&header_bytes.to_le_bytes());
        }
        file
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    #[test]
    fn damaged_files_are_judged_as_by_the_crate(file in damaged_file()) {
        let theirs = ::safetensors::SafeTensors::deserialize(&file);
        match parse_file(&file) {
            Ok(header) => {
                let theirs = theirs.expect("the crate refuses what was accepted");
                for tensor in &header.tensors {
                    let view = theirs.tensor(&tensor.name).unwrap();
                    let extent = tensor.extent.start as usize..tensor.extent.end as usize;
                    prop_assert_eq!(view.data(), &file[extent]);
                    prop_assert_eq!(view.dtype(), tensor.dtype);
                }
                prop_assert_eq!(theirs.len(), header.tensors.len());
            }
            Err(error) => {
                prop_assert_eq!(error.code(), ErrorCode::Format);
                let twice = error.to_string().contains("twice");
                prop_assert!(theirs.is_err() || twice, "only the crate accepts: {}", error);
            }
        }
    }

    #[test]
    fn any_bytes_are_parsed_or_refused(file in prop::collection::vec(any::<u8>(), 0..200)) {
        if let Err(error) = parse_file(&file) {
            prop_assert_eq!(error.code(), ErrorCode::Format);
        }
        let _ = parse_header("the file", &file, file.len() as u64);
    }
}
