//! How the source is kept: one direction of imports, unsafe in its places, files of one screen's
//! worth of ideas.

#![expect(clippy::unwrap_used, reason = "in a test a panic is the report")]

use std::fs;
use std::path::{Path, PathBuf};

/// Rows of the architecture; the longest prefix counts. A module imports only from lower rows, or
/// from its own folder on its own row.
const ROWS: &[(&str, u32)] = &[
    ("units", 0),
    ("error", 0),
    ("names", 0),
    ("options", 0),
    ("outcome", 0),
    ("process", 0),
    ("counters", 0),
    ("trace", 0),
    ("slots", 0),
    ("sync", 0),
    ("sync/ticket", 0),
    ("driver/code", 0),
    ("driver", 1),
    ("memory/page_table", 2),
    ("memory/policy", 2),
    ("memory/budget", 2),
    ("model/binding", 2),
    ("model/schedule", 2),
    ("model/placement", 2),
    ("model/policy_model", 2),
    ("copy/ring", 2),
    ("host/safetensors", 2),
    ("host/allowance", 2),
    ("sync/clock", 3),
    ("sync/wait", 3),
    ("sync/context", 3),
    ("sync/fence", 3),
    ("sync/device", 3),
    ("host", 3),
    ("memory/vbar", 4),
    ("memory/saves", 4),
    ("memory/space", 4),
    ("memory/frames", 4),
    ("copy", 4),
    ("memory/pager", 5),
    ("copy/engine", 6),
    ("memory/pins", 5),
    ("model", 7),
    ("torch", 7),
    ("runtime", 8),
    ("ffi", 9),
    ("bin", 9),
];

/// The only files that may hold unsafe code.
const UNSAFE: &[&str] = &[
    "src/process.rs",
    "src/copy/staging/every_order.rs",
    "src/memory/page_table/every_order.rs",
    "src/slots/barrier.rs",
    "src/slots/handles.rs",
    "src/slots/tokens.rs",
    "src/ffi/ahead.rs",
    "src/ffi/allocation.rs",
    "src/ffi/bar.rs",
    "src/ffi/call.rs",
    "src/ffi/capsule.rs",
    "src/ffi/device.rs",
    "src/ffi/dlpack.rs",
    "src/ffi/fault.rs",
    "src/ffi/log.rs",
    "src/ffi/saves.rs",
    "src/ffi/model.rs",
    "src/ffi/sim.rs",
    "src/ffi/source.rs",
    "src/ffi/sim_graph.rs",
    "src/ffi/statistics.rs",
    "src/ffi/status.rs",
    "src/ffi/token.rs",
    "src/ffi/torch.rs",
    "src/ffi/torch/callable.rs",
    "src/ffi/torch/graph.rs",
    "src/ffi/torch/numbers.rs",
    "src/ffi/torch/record.rs",
    "src/ffi/torch/throw.rs",
    "src/ffi/transfer.rs",
    "src/ffi/value.rs",
    "src/ffi/wait.rs",
    "src/sync/clock.rs",
    "src/host/file_pages.rs",
    "src/host/anonymous.rs",
    "src/host/locked.rs",
    "src/host/memory.rs",
    "src/host/pageable.rs",
    "src/driver/mod.rs",
    "src/driver/modelled.rs",
    "src/driver/sys.rs",
    "src/driver/cuda/mod.rs",
    "src/driver/cuda/graph.rs",
    "src/driver/cuda/kernels.rs",
    "src/driver/cuda/linear.rs",
    "src/driver/cuda/place.rs",
    "src/driver/cuda/pointer.rs",
    "src/driver/sim/device.rs",
    "src/driver/sim/door.rs",
    "src/driver/sim/execute.rs",
    "src/driver/sim/host.rs",
    "src/driver/sim/inspect.rs",
    "src/driver/sim/memory.rs",
    "src/driver/sim/os.rs",
];

const LINES_MAX: usize = 600;
const COLUMNS_MAX: usize = 100;

fn sources(folder: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join(folder)];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            match path.extension() {
                _ if path.is_dir() => folders.push(path),
                Some(extension) if extension == "rs" => found.push(path),
                _ => {}
            }
        }
    }
    assert!(!found.is_empty());
    found
}

fn relative(path: &Path) -> String {
    path.strip_prefix(env!("CARGO_MANIFEST_DIR")).unwrap().to_str().unwrap().to_owned()
}

/// `memory/pager/plan` for `src/memory/pager/plan.rs`.
fn module_of(path: &Path) -> String {
    let name = relative(path);
    let name = name.strip_prefix("src/").unwrap().strip_suffix(".rs").unwrap();
    name.strip_suffix("/mod").unwrap_or(name).to_owned()
}

fn row_of(module: &str) -> (&'static str, u32) {
    let fits = |prefix: &str| {
        module == prefix || module.strip_prefix(prefix).is_some_and(|rest| rest.starts_with('/'))
    };
    let rows = ROWS.iter().filter(|(prefix, _)| fits(prefix));
    *rows.max_by_key(|(prefix, _)| prefix.len()).unwrap_or_else(|| panic!("{module} has no row"))
}

/// Every `crate::a::b::...` path of a file, as `a/b/...`, braces after `::` opened once.
fn imports(text: &str) -> Vec<String> {
    let code = text.lines().filter(|line| !line.trim_start().starts_with("//"));
    let code: String = code.map(|line| format!("{line}\n")).collect();
    let mut found = Vec::new();
    for (at, _) in code.match_indices("crate::") {
        let rest = &code[at + "crate::".len()..];
        let end = rest.find(|c: char| !(c.is_alphanumeric() || c == '_' || c == ':'));
        let path = rest[..end.unwrap_or(rest.len())].trim_end_matches(':').replace("::", "/");
        found.push(path);
    }
    found
}

#[test]
fn modules_import_only_from_lower_rows() {
    let mut wrong = Vec::new();
    for path in sources("src") {
        let module = module_of(&path);
        // The crates' roots and files that only list a folder's modules have no row.
        let lists_only =
            ["lib", "every_order", "memory", "copy", "model", "host"].contains(&module.as_str());
        if lists_only || module.starts_with("bin") {
            continue;
        }
        let (_, own_row) = row_of(&module);
        let own_folder = module.split('/').next().unwrap();
        for import in imports(&fs::read_to_string(&path).unwrap()) {
            // Names that lib.rs re-exports are those of row 0.
            if matches!(import.split('/').next().unwrap(), "Result" | "Error" | "ErrorCode") {
                continue;
            }
            if import == "memory" {
                continue; // `pub(in crate::memory)`
            }
            let (_, row) = row_of(&import);
            let folder = import.split('/').next().unwrap();
            if !(row < own_row || row == own_row && (folder == own_folder || row == 0)) {
                wrong.push(format!("{module} (row {own_row}) imports {import} (row {row})"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn unsafe_code_is_where_it_is_registered() {
    for path in sources("src") {
        let text = fs::read_to_string(&path).unwrap();
        let opted_in = text.contains("unsafe_code");
        let registered = UNSAFE.contains(&relative(&path).as_str());
        assert_eq!(opted_in, registered, "{}", relative(&path));
    }
}

#[test]
fn files_are_short_and_open_with_their_idea() {
    let mut wrong = Vec::new();
    for path in ["src", "tests", "benches"].into_iter().flat_map(sources) {
        let (name, text) = (relative(&path), fs::read_to_string(&path).unwrap());
        if !text.starts_with("//!") {
            wrong.push(format!("{name}: does not open with `//!`"));
        }
        if text.lines().count() > LINES_MAX {
            wrong.push(format!("{name}: {} lines", text.lines().count()));
        }
        for (number, line) in text.lines().enumerate() {
            if line.chars().count() > COLUMNS_MAX {
                wrong.push(format!("{name}:{}: {} columns", number + 1, line.chars().count()));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// What a message is made of is not made where nobody listens: an error that may lose the device
/// is noted before.
#[test]
fn no_error_is_noted_within_a_message() {
    let mut wrong = Vec::new();
    for path in sources("src") {
        let text = fs::read_to_string(&path).unwrap();
        for message in text.split("log::").skip(1) {
            let message = message.split(';').next().unwrap();
            if message.contains("!(") && message.contains(".note(") {
                wrong.push(format!("{}: log::{message}", relative(&path)));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// ThreadSanitizer sees no minimum and no maximum of an atomic number, and tells of what they order
/// as of no order: `sync::raise` is the same by exchanges.
#[test]
fn what_orders_threads_is_seen_by_the_sanitizer() {
    let mut wrong = Vec::new();
    for path in sources("src") {
        let text = fs::read_to_string(&path).unwrap();
        if [".fetch_max(", ".fetch_min("].iter().any(|call| text.contains(call)) {
            wrong.push(relative(&path));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Those of faults met in the field: `docs/scenarios.md`.
const SCENARIOS: &[u32] = &[
    1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 13, 14, 15, 17, 18, 19, 20, 22, 23, 24, 25, 26, 28, 29, 30, 31,
    32, 34, 35, 36, 38, 39, 41, 42, 43, 44, 46, 47, 49, 50, 51, 52, 56, 57, 58, 59, 60,
];

/// The tests of a file in Rust or Python.
fn tests_of(path: &str) -> Vec<String> {
    let text = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(path));
    let text = text.unwrap_or_else(|error| panic!("{path}: {error}"));
    let name = |line: &str| line.split('(').next().unwrap().to_owned();
    if path.ends_with(".py") {
        let starts = text.lines().filter_map(|line| line.trim_start().strip_prefix("def test_"));
        return starts.map(|line| format!("test_{}", name(line))).collect();
    }
    let after = text.split("#[test]\n").skip(1);
    after.map(|rest| name(rest.split_once("fn ").unwrap().1)).collect()
}

/// The scenarios that a test has in its name.
fn scenarios_of(test: &str) -> Vec<u32> {
    let Some((_, rest)) = test.split_once("scenario") else { return Vec::new() };
    let words = rest.trim_start_matches('s').split('_').skip(1);
    let numbers = words.take_while(|word| *word == "and" || word.parse::<u32>().is_ok());
    numbers.filter_map(|word| word.parse().ok()).collect()
}

fn files_of_tests() -> Vec<String> {
    let python = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/python");
    let names = fs::read_dir(python).unwrap().map(|entry| entry.unwrap().file_name());
    let names = names.filter_map(|name| name.into_string().ok());
    let python = names.filter(|name| name.starts_with("test_") && name.ends_with(".py"));
    let rust = sources("tests").into_iter().map(|path| relative(&path));
    rust.chain(python.map(|name| format!("tests/python/{name}"))).collect()
}

/// Whether a name of a test, `tests/a.rs::name` or `tests/a.rs::begin*`, means that test.
fn means(named: &str, path: &str, test: &str) -> bool {
    let (file, name) = named.split_once("::").unwrap();
    file == path
        && name.strip_suffix('*').map_or(name == test, |beginning| test.starts_with(beginning))
}

fn check_where(row: &str, named: &[&str], told: &str) {
    let on_gpu = |name: &&&str| name.contains("_gpu.py::") || name.starts_with("tests/device.rs::");
    let gpu = named.iter().filter(on_gpu).count();
    let expected = match (gpu, named.len() - gpu) {
        (0, 0) => "",
        (0, _) => "sim",
        (_, 0) => "GPU",
        _ => "sim, GPU",
    };
    assert_eq!(told, expected, "{row}");
}

#[test]
fn every_scenario_has_its_tests_or_says_why_not() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/scenarios.md");
    let page = fs::read_to_string(page).unwrap();
    let tests: Vec<(String, Vec<String>)> =
        files_of_tests().into_iter().map(|path| (path.clone(), tests_of(&path))).collect();
    let mut rows = std::collections::BTreeMap::new();
    for line in page.lines().filter(|line| line.starts_with("| ") && !line.ends_with("| on |")) {
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        let [number, _, kept_out, named, told] = cells[..] else { panic!("{line}") };
        let named: Vec<&str> = named.split('`').skip(1).step_by(2).collect();
        for named in &named {
            let (path, _) = named.split_once("::").unwrap_or_else(|| panic!("{named}"));
            let is_there = tests_of(path).iter().any(|test| means(named, path, test));
            assert!(is_there, "docs/scenarios.md: there is no test {named}");
        }
        check_where(line, &named, told);
        assert!(!named.is_empty() || kept_out.starts_with("cannot apply"), "{line}");
        if let Ok(number) = number.parse::<u32>() {
            assert!(rows.insert(number, named).is_none(), "{number} stands there twice");
        }
    }
    assert_eq!(rows.keys().copied().collect::<Vec<_>>(), SCENARIOS);
    for (path, tests) in &tests {
        for (test, number) in
            tests.iter().flat_map(|test| scenarios_of(test).into_iter().map(move |one| (test, one)))
        {
            let row = rows.get(&number).unwrap_or_else(|| panic!("{path}: {test}: no such number"));
            let is_there = row.iter().any(|named| means(named, path, test));
            assert!(is_there, "docs/scenarios.md lacks {path}::{test} in row {number}");
        }
    }
}

/// The texts of the library, as they are when their lines are joined.
fn texts() -> String {
    let mut all = String::new();
    for path in sources("src") {
        let text = fs::read_to_string(&path).unwrap();
        for line in text.lines() {
            // A backslash at the end of a line joins it with the next one, without its indentation.
            match line.strip_suffix('\\') {
                Some(begun) => {
                    all.push_str(if all.ends_with('\n') { begun } else { begun.trim_start() })
                }
                None if all.ends_with('\n') || all.is_empty() => all.push_str(line),
                None => all.push_str(line.trim_start()),
            }
            if !line.ends_with('\\') {
                all.push('\n');
            }
        }
    }
    let shim = Path::new(env!("CARGO_MANIFEST_DIR")).join("python_shim/vbar/_library.py");
    all + &fs::read_to_string(shim).unwrap()
}

/// What a document quotes of messages is what they say: the pieces between names and numbers, in
/// their order, close to each other.
#[test]
fn the_messages_that_are_explained_are_those_of_the_source() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let document = fs::read_to_string(folder.join("docs/messages.md")).unwrap();
    let texts = texts();
    let mut count = 0;
    for quoted in document.lines().filter_map(|line| line.strip_prefix("> ")) {
        count += 1;
        for piece in quoted.trim_matches('`').split('…').map(|piece| piece.trim()) {
            let piece = piece.trim_start_matches(": ").trim_start_matches("; ");
            assert!(piece.len() < 3 || texts.contains(piece), "no message has '{piece}': {quoted}");
        }
    }
    assert!(count > 20, "{count} messages are explained");
    let reasons = fs::read_to_string(folder.join("src/outcome.rs")).unwrap();
    let reasons = reasons.split("Reason {").nth(1).unwrap().split("\n    }").next().unwrap();
    for word in reasons.split('"').skip(1).step_by(2) {
        assert!(
            document.contains(&format!("\n| `{word}` |")),
            "the reason {word} is not explained"
        );
    }
}
