//! Help, the manual page and completions: all of one definition, and none with a gap.

use std::io::Write;
use std::process::{Command, Stdio};

use crate::program::{json, lines, output};

const SUBCOMMANDS: &[&str] =
    &["doctor", "inspect", "synth", "run", "trace", "stress", "bench", "completions"];

/// The options and arguments that a subcommand's help lists: `--device`, `<MODEL>`, `[MODEL]`.
fn listed(help: &str) -> Vec<String> {
    let mut found = Vec::new();
    for line in help.lines().filter(|line| line.starts_with("  ")) {
        let word = line.split_whitespace().find(|word| !word.starts_with("-h") && *word != "-V,");
        let word = word.unwrap_or_default().trim_end_matches(',');
        if word.starts_with("--") && word.len() > 2 {
            found.push(word.to_owned());
        }
    }
    found
}

#[test]
fn help_has_examples_and_exit_codes() {
    for subcommand in SUBCOMMANDS {
        let help = lines(0, &[subcommand, "--help"]);
        let (before, after) = help.split_once("\nExamples:\n").expect(&help);
        assert!(before.contains("Usage: vbar "), "{help}");
        assert!(after.contains(&format!("  vbar {subcommand}")), "{help}");
        for code in ["0", "2  wrong arguments", "3  an error"] {
            assert!(after.contains(&format!("\n  {code}")), "{help}");
        }
    }
    let help = lines(0, &["--help"]);
    for expected in ["Examples:", "Exit codes:", "Environment:", "VBAR_DRIVER", "NO_COLOR"] {
        assert!(help.contains(expected), "{help}");
    }
    assert!(SUBCOMMANDS.iter().all(|name| help.contains(&format!("\n  {name} "))), "{help}");
    assert!(!help.contains("\n  man "), "{help}");
}

#[test]
fn the_manual_page_has_every_subcommand_and_option() {
    let page = lines(0, &["man"]);
    assert_eq!(json(0, &["man", "--json"])["page"], page.as_str());
    let sections: Vec<&str> = page
        .lines()
        .filter_map(|line| line.strip_prefix(".SH "))
        .map(|s| s.trim_matches('"'))
        .collect();
    let expected = [
        "NAME",
        "SYNOPSIS",
        "DESCRIPTION",
        "OPTIONS",
        "COMMANDS",
        "EXAMPLES",
        "EXIT STATUS",
        "ENVIRONMENT",
        "FILES",
        "SEE ALSO",
    ];
    assert_eq!(sections, expected);
    assert!(page.contains(".TH vbar 1"), "{page}");
    // Hyphens of options are escaped in roff.
    let plain = page.replace("\\-", "-");
    let commands =
        plain.split_once(".SH COMMANDS").unwrap().1.split_once(".SH EXAMPLES").unwrap().0;
    for subcommand in SUBCOMMANDS {
        let heading = format!(".SS \"vbar {subcommand}\"\n");
        let (_, part) = commands.split_once(&heading).unwrap_or_else(|| panic!("{heading}{page}"));
        let part = part.split_once(".SS ").map_or(part, |(part, _)| part);
        let options = listed(&lines(0, &[subcommand, "--help"]));
        assert!(options.len() >= 2, "{subcommand}: {options:?}");
        for option in options {
            assert!(part.contains(&option), "{subcommand} {option}\n{part}");
        }
    }
}

/// Requests are known ones, and none stands open at the end. groff's own opinion where it is.
#[test]
fn the_manual_page_is_well_formed() {
    let page = lines(0, &["man"]);
    let known =
        [".TH", ".SH", ".SS", ".PP", ".TP", ".RS", ".RE", ".nf", ".fi", ".ie", ".el", ".IP", ".br"];
    let mut open = 0;
    for line in page.lines() {
        if let Some(request) = line.split(' ').next().filter(|word| word.starts_with('.')) {
            assert!(known.contains(&request), "{line}");
            open += match request {
                ".RS" | ".nf" => 1,
                ".RE" | ".fi" => -1,
                _ => 0,
            };
            assert!(open >= 0, "{line}");
        }
        assert!(line.chars().count() < 1000 && !line.contains('\t'), "{line}");
    }
    assert_eq!(open, 0);
    let groff = Command::new("groff")
        .args(["-man", "-Tutf8", "-ww", "-z"])
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let Ok(mut groff) = groff else { return };
    groff.stdin.take().unwrap().write_all(page.as_bytes()).unwrap();
    let output = groff.wait_with_output().unwrap();
    assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn completions_know_the_subcommands_and_their_options() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = lines(0, &["completions", shell]);
        for word in SUBCOMMANDS.iter().chain(&["no-measure", "page-size", "budget"]) {
            assert!(script.contains(word), "{shell} does not know {word}");
        }
        // What is hidden from help is hidden here too.
        let words = script.split(|sign: char| !(sign.is_alphanumeric() || sign == '-'));
        assert!(!words.into_iter().any(|word| word == "man"), "{shell}");
        let report = json(0, &["completions", shell, "--json"]);
        assert_eq!((&report["shell"], &report["script"]), (&shell.into(), &script.as_str().into()));
    }
    assert_eq!(output(&["completions", "tcsh"]).status.code(), Some(2));
}

#[test]
fn bash_completes_by_the_script() {
    let script = lines(0, &["completions", "bash"]);
    let ask = "COMP_WORDS=(vbar doctor --no); COMP_CWORD=2; _vbar vbar --no doctor; \
               printf '%s\\n' \"${COMPREPLY[@]}\"";
    let bash = Command::new("bash").args(["-c", &format!("{script}\n{ask}")]).output();
    // Where there is no bash nobody needs it.
    let Ok(answer) = bash else { return };
    assert_eq!(String::from_utf8_lossy(&answer.stdout), "--no-measure\n");
}
