//! `vbar bench`: figures that programs read, and plots.

use serde_json::Value;

use crate::program::{SIM, json, lines, model, number, output, text};

#[test]
fn policies_are_computed_the_same_each_time() {
    let arguments = ["bench", "policy", "--link", "55", "--budgets", "5,50,100", "--json"];
    let report = json(0, &arguments);
    assert_eq!(report, json(0, &arguments));
    let workloads = report["workloads"].as_array().unwrap();
    let names: Vec<&str> = workloads.iter().map(|one| one["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["loop", "balanced", "uneven", "workflow", "experts"]);
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
        // Of experts that take turns, each fits in half of the pages: a cache finds it.
        let is_prefix_good = of("prefix", "cycle_ms") < of("lru", "cycle_ms");
        assert_eq!(is_prefix_good, workload["name"] != "experts");
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
    assert_eq!(svg.matches("<polyline").count(), 5 * 5);
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

/// Small, on a device with small pages.
const SMALL: &[&str] = &["--bytes", "2M", "--rounds", "2", "--page-size", "64K", "--device", SIM];

#[test]
fn a_load_stands_beside_its_floors() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("load.svg");
    let arguments = [&["bench", "load", "--svg", text(&path), "--json"][..], SMALL].concat();
    let report = json(0, &arguments);
    assert_eq!((&report["ok"], number(&report, "rounds")), (&Value::Bool(true), 2));
    assert!(number(&report, "model_bytes") >= 2 << 20 && positive(&report["link_rate"]));
    let rates = report["read_rates"].as_array().unwrap();
    let threads: Vec<u64> = rates.iter().map(|rate| number(rate, "threads")).collect();
    assert_eq!(threads, [1, 4, 8, 16]);
    let has_direct = report["direct_missing"].is_null();
    for rate in rates {
        assert!(positive(&rate["cached"]) && rate["direct"].is_number() == has_direct, "{rate}");
    }
    let loads = report["loads"].as_array().unwrap();
    let ways: Vec<(&str, &str)> = loads
        .iter()
        .map(|load| (load["cache"].as_str().unwrap(), load["faults"].as_str().unwrap()))
        .collect();
    let expected = [("warm", "model"), ("warm", "tensor"), ("cold", "model"), ("cold", "tensor")];
    assert_eq!(ways, expected);
    for load in loads {
        assert_eq!(load["rounds_ms"].as_array().unwrap().len(), 2);
        assert!(positive(&load["ms"]) && positive(&load["rate"]), "{load}");
        let has_floor = load["cache"] == "warm" || has_direct;
        assert_eq!(load["over_floor"].is_number(), has_floor, "{load}");
        let sources = ["locked_cache_bytes", "registered_bytes", "page_cache_bytes", "disk_bytes"];
        let bytes: u64 = sources.iter().map(|of| number(&load["sources"], of)).sum();
        assert!(bytes >= 2 << 20, "{load}");
    }
    assert!(report["notes"].is_array());
    let svg = std::fs::read_to_string(&path).unwrap();
    assert_eq!(svg.matches("<polyline").count(), 5);
}

#[test]
fn a_stream_stands_beside_its_bounds() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("stream.svg");
    let arguments = ["bench", "stream", "--budgets", "50,100", "--svg", text(&path), "--json"];
    let report = json(0, &[&arguments[..], SMALL].concat());
    assert!(positive(&report["link_rate"]) && positive(&report["compute_ms"]), "{report}");
    let pages = number(&report, "model_pages");
    let rows = report["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 2);
    for (row, percent) in rows.iter().zip([50, 100]) {
        assert_eq!(number(row, "budget_percent"), percent);
        assert_eq!(number(row, "budget_pages"), (pages * percent).div_ceil(100));
        assert_eq!(number(row, "least_loads"), pages - number(row, "budget_pages"));
        assert_eq!(row["rounds_ms"].as_array().unwrap().len(), 2);
        for key in ["pass_ms", "first_pass_ms", "first_over_bound", "over_bound", "over_ideal"] {
            assert!(positive(&row[key]), "{key} in {row}");
        }
        assert!(row["waits"].is_object() && row["sources"].is_object(), "{row}");
        assert_eq!(number(row, "offloaded"), 0, "{row}");
    }
    // With all of it resident nothing comes over the link.
    let whole = &rows[1];
    assert_eq!((&whole["loads"], number(whole, "streamed_bytes")), (&Value::from(0.0), 0));
    assert!(rows[0]["loads"].as_f64().unwrap() > 0.0);
    let svg = std::fs::read_to_string(&path).unwrap();
    assert_eq!(svg.matches("<polyline").count(), 4);
}

#[test]
fn measurements_of_a_given_model_leave_it_alone() {
    let (_folder, path) = model("1M");
    let before = std::fs::read(&path).unwrap();
    for benchmark in ["load", "stream"] {
        let arguments = ["bench", benchmark, text(&path), "--rounds", "1", "--page-size", "64K"];
        let arguments = [&arguments[..], &["--device", SIM, "--prefer", "disk"]].concat();
        let shown = lines(0, &[&arguments[..], &["--host-allowance", "0"]].concat());
        assert!(shown.contains("link ") && shown.contains("GB/s"), "{shown}");
        assert!(std::fs::read(&path).unwrap() == before);
    }
    let large = ["bench", "load", "--bytes", "80M", "--rounds", "1", "--device", SIM];
    let report = json(2, &[&large[..], &["--page-size", "64K", "--json"]].concat());
    assert!(report["error"].as_str().unwrap().contains("does not fit"), "{report}");
    for wrong in [&["--rounds", "0"][..], &["--bytes", "1"], &["--bytes", "1M", text(&path)]] {
        for benchmark in ["load", "stream"] {
            let arguments = [&["bench", benchmark][..], wrong].concat();
            assert_eq!(output(&arguments).status.code(), Some(2), "{wrong:?}");
        }
    }
    for wrong in [["--compute-ratio", "-1"], ["--learn", "0"], ["--budgets", "0"]] {
        let arguments = [&["bench", "stream"][..], &wrong[..]].concat();
        assert_eq!(output(&arguments).status.code(), Some(2), "{wrong:?}");
    }
}

#[track_caller]
fn positive(value: &Value) -> bool {
    value.as_f64().unwrap_or_else(|| panic!("{value} is no number")) > 0.0
}
