//! The README's programs are the files in `examples/` that other tests compile and run.

#![expect(clippy::unwrap_used, reason = "in a test a panic is the report")]

use std::path::Path;

fn read(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(name);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// The fenced block whose fence says `language`.
fn block(readme: &str, language: &str) -> String {
    let start = format!("```{language}\n");
    let (_, rest) = readme.split_once(&start).unwrap_or_else(|| panic!("no block of {language}"));
    rest.split_once("```").unwrap().0.to_owned()
}

#[test]
fn the_smallest_programs_are_those_that_run() {
    let readme = read("README.md");
    for (language, file) in [
        ("c", "examples/smallest.c"),
        ("cpp", "examples/smallest.cpp"),
        ("python", "examples/smallest.py"),
        ("rust no_run", "examples/smallest.rs"),
        ("py", "examples/torch_tensors.py"),
    ] {
        assert!(block(&readme, language) == read(file), "README.md: its {language} is not {file}");
    }
}

/// Names in backticks of a cell.
fn names(cell: &str) -> Vec<&str> {
    cell.split('`').skip(1).step_by(2).collect()
}

fn read_all(folder: &str, ends: &[&str]) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(folder);
    let mut files: Vec<_> = std::fs::read_dir(path).unwrap().map(|file| file.unwrap()).collect();
    files.sort_by_key(std::fs::DirEntry::file_name);
    let names = files.iter().map(|file| file.file_name().into_string().unwrap());
    let wanted = names.filter(|name| ends.iter().any(|end| name.ends_with(end)));
    wanted.map(|name| read(&format!("{folder}/{name}"))).collect()
}

#[test]
fn the_operations_are_there_in_every_language() {
    let readme = read("README.md");
    let (_, table) =
        readme.split_once("| C | C++ | Python | Rust |\n|---|---|---|---|---|\n").unwrap();
    let rows: Vec<&str> = table.lines().take_while(|line| line.starts_with('|')).collect();
    assert!(rows.len() > 25, "{} rows", rows.len());
    let c = read_all("include", &[".h"]);
    let cpp = read_all("include", &[".hpp"]);
    let python = read_all("python_shim/vbar", &[".py"]);
    let rust: String =
        ["src/runtime", "src/host", "src/sync"].map(|one| read_all(one, &[".rs"])).concat();
    for row in rows {
        let cells: Vec<&str> = row.trim_matches('|').split('|').collect();
        assert_eq!(cells.len(), 5, "{row}");
        let is_there = |name: &str, text: &str, forms: &[&str]| {
            let last = name.rsplit([':', '.']).next().unwrap();
            let found = forms.iter().any(|form| text.contains(&form.replace('@', last)));
            assert!(found, "README.md: there is no {name}");
        };
        for name in names(cells[1]) {
            is_there(name, &c, &["VbarStatus @("]);
        }
        for name in names(cells[2]) {
            is_there(name, &cpp, &[" @(", " *@(", "] @ {"]);
        }
        for name in names(cells[3]) {
            is_there(name, &python, &["def @(", "class @(", "self.@: ", "    @: "]);
        }
        for name in names(cells[4]) {
            is_there(name, &rust, &["pub fn @(", "pub fn @<"]);
        }
    }
}
