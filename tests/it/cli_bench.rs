//! `vbar bench`: figures that programs read, and plots.

use crate::program::{json, lines, output, text};

#[test]
fn policies_are_computed_the_same_each_time() {
    let arguments = ["bench", "policy", "--link", "55", "--budgets", "5,50,100", "--json"];
    let report = json(0, &arguments);
    assert_eq!(report, json(0, &arguments));
    let workloads = report["workloads"].as_array().unwrap();
    let names: Vec<&str> = workloads.iter().map(|one| one["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["loop", "balanced", "uneven", "workflow"]);
    for workload in workloads {
        let rows = workload["rows"].as_array().unwrap();
        assert_eq!(rows.len(), 3 * 5);
        for row in rows {
            let is_refused = row["loads_per_cycle"].is_null();
            assert_eq!(row["frames_needed"].is_number(), is_refused, "{row}");
            // 512 MiB do not fit in 5 % of the uneven model.
            let is_small = workload["name"] == "uneven" && row["budget_percent"] == 5;
            assert_eq!(is_refused, is_small, "{row}");
            if row["budget_percent"] == 100 {
                assert_eq!(row["loads_per_cycle"], 0.0, "{row}");
            }
        }
        let of = |policy: &str, key: &str| {
            let mut rows = rows.iter().filter(|row| row["budget_percent"] == 50);
            let row = rows.find(|row| row["policy"] == policy).unwrap();
            row[key].as_f64().unwrap()
        };
        assert_eq!(of("belady", "over_optimum"), 1.0);
        assert!(of("spread", "cycle_ms") < of("prefix", "cycle_ms"));
        assert!(of("prefix", "cycle_ms") < of("lru", "cycle_ms"));
    }
}

#[test]
fn a_plot_has_a_line_for_each_policy() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("policy.svg");
    let shown = lines(0, &["bench", "policy", "--svg", text(&path)]);
    assert!(shown.contains("plot in "), "{shown}");
    let svg = std::fs::read_to_string(&path).unwrap();
    assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"));
    assert_eq!(svg.matches("<polyline").count(), 4 * 5);
    let missing = folder.path().join("missing/policy.svg");
    lines(3, &["bench", "policy", "--svg", text(&missing)]);
}

#[test]
fn wrong_rates_and_budgets_are_refused() {
    for wrong in [["--link", "0"], ["--link", "x"], ["--budgets", "0"], ["--budgets", "50,101"]] {
        let arguments = [&["bench", "policy"][..], &wrong[..]].concat();
        assert_eq!(output(&arguments).status.code(), Some(2), "{wrong:?}");
    }
    assert_eq!(output(&["bench"]).status.code(), Some(2));
}
