//! Terminals of 40, 80 and 120 columns: every command fits, in colours or without.

use crate::program::{SIM, model, on_terminal, text};

const COLUMNS: [u16; 3] = [40, 80, 120];

/// Runs a command on terminals of each width; it must return `code` and fit.
#[track_caller]
fn check(code: i32, arguments: &[&str]) -> String {
    let mut last = String::new();
    for columns in COLUMNS {
        let shown = on_terminal(columns, arguments, &[]);
        assert_eq!(shown.code, Some(code), "{arguments:?}: {}", shown.raw);
        shown.check_fits(columns);
        let plain = on_terminal(columns, arguments, &[("NO_COLOR", "1")]);
        assert!(!plain.raw.contains("\u{1b}[3"), "colours in spite of NO_COLOR: {}", plain.raw);
        last = shown.text();
    }
    last
}

#[test]
fn help_fits() {
    check(0, &["--help"]);
    for subcommand in
        ["doctor", "inspect", "synth", "run", "trace", "stress", "bench", "completions"]
    {
        check(0, &[subcommand, "--help"]);
    }
}

#[test]
fn the_doctor_fits() {
    let (_folder, path) = model("64K");
    let text = check(0, &["doctor", text(&path), "--device", SIM, "--no-measure"]);
    assert!(text.contains("RAM allowance"), "{text}");
    check(1, &["doctor", "--device", "sim:vmm=0"]);
}

#[test]
fn a_model_fits() {
    let (_folder, path) = model("4M");
    check(0, &["inspect", text(&path), "--page-size", "64K"]);
    check(0, &["inspect", text(&path), "--all"]);
}

#[test]
fn a_run_fits_and_draws() {
    let (_folder, path) = model("4M");
    let arguments = ["run", text(&path), "--device", SIM, "--budget", "50%", "--verify"];
    let text = check(0, &arguments);
    for expected in ["pages    # resident", "pass 2/2", "ok: every tensor"] {
        assert!(text.contains(expected), "{expected}: {text}");
    }
}

#[test]
fn the_policies_fit() {
    check(0, &["bench", "policy", "--help"]);
    let text = check(0, &["bench", "policy", "--budgets", "20,50,80"]);
    assert!(text.contains("belady"), "{text}");
}

#[test]
fn stress_and_synth_fit() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a_model_with_a_rather_long_name.safetensors");
    check(0, &["synth", text(&path), "--bytes", "1M"]);
    check(0, &["stress", "--seconds", "1", "--threads", "2", "--device", "sim"]);
}

#[test]
fn one_object_is_one_object_on_a_terminal_too() {
    let (_folder, path) = model("64K");
    for arguments in
        [&["inspect", text(&path), "--json"][..], &["doctor", "--device", SIM, "--json"]]
    {
        let shown = on_terminal(40, arguments, &[]);
        let value: serde_json::Value = serde_json::from_str(&shown.raw).unwrap();
        assert_eq!(value["ok"], true);
    }
}
