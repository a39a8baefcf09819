//! The program against a driver that keeps account of every KV slot, and against drivers that fail.

mod driver;

use std::fs;
use std::io::Read;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;

/// No run takes nearly as long.
const WATCHDOG: Duration = Duration::from_mins(1);

/// Runs as the driver when a test's script says so; for the test runner it is a test that passes.
#[test]
fn stand_in() {
    if let Ok(config) = std::env::var("PIE_LOAD_TEST_CONFIG") {
        driver::main(&config);
    }
}

/// What a run has left.
struct Outcome {
    success: bool,
    stdout: String,
    stderr: String,
    json: Value,
    samples: Value,
    /// `requests tokens pages samplers drafts` of every frame that the driver took.
    frames: Vec<[u32; 5]>,
}

/// Runs `pie_load` against the stand-in of that behaviour.
fn load(behaviour: &str, arguments: &[&str]) -> Outcome {
    let folder = TempDir::new().unwrap();
    let [json, log] = ["out.json", "driver.log"].map(|name| folder.path().join(name));
    let mut child = Command::new(env!("CARGO_BIN_EXE_pie_load"))
        .args(arguments)
        .args([
            "--device",
            "cpu",
            "--profile",
            "balanced",
            "--commit",
            "c0ffee",
            "--page-size",
            "4",
        ])
        .arg("--python")
        .arg(script(&folder))
        .arg("--model")
        .arg(folder.path())
        .arg("--json")
        .arg(&json)
        .arg("--log")
        .arg(&log)
        .env("PIE_LOAD_TEST_BEHAVIOUR", behaviour)
        // A load that is killed cannot tidy up.
        .env("TMPDIR", folder.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let started = Instant::now();
    let region = format!("/dev/shm/pie_shmem_g{}", (1_u32 << 31) + child.id());
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if started.elapsed() > WATCHDOG {
            child.kill().unwrap();
        }
        thread::sleep(Duration::from_millis(5));
    };
    assert!(started.elapsed() < WATCHDOG, "pie_load hung");
    // Of a load that was killed the driver removes it, a moment later.
    while PathBuf::from(&region).exists() {
        assert!(started.elapsed() < WATCHDOG, "{region} was left over");
        thread::sleep(Duration::from_millis(5));
    }
    let [mut stdout, mut stderr] = [String::new(), String::new()];
    child.stdout.unwrap().read_to_string(&mut stdout).unwrap();
    child.stderr.unwrap().read_to_string(&mut stderr).unwrap();
    let parsed = |path: PathBuf| {
        let text = fs::read_to_string(path).unwrap_or_default();
        serde_json::from_str(&text).unwrap_or_default()
    };
    let log = fs::read_to_string(log).unwrap_or_default();
    let frames = log.lines().filter_map(|line| line.strip_prefix("frame "));
    let numbers = |line: &str| {
        let numbers = line.split(' ').map(|number| number.parse().unwrap());
        numbers.collect::<Vec<u32>>().try_into().unwrap()
    };
    Outcome {
        success: status.success(),
        stdout,
        stderr,
        samples: parsed(json.with_extension("samples.json")),
        json: parsed(json),
        frames: frames.map(numbers).collect(),
    }
}

/// What `--python` names: it checks the command line of the protocol and becomes this test program.
fn script(folder: &TempDir) -> PathBuf {
    let path = folder.path().join("python");
    let this = std::env::current_exe().unwrap();
    let text = format!(
        "#!/bin/sh\n\
         [ \"$#:$1:$2:$3:$5:$6\" = 6:-m:pie_driver_sglang:--config:--handshake-fd:3 ] || exit 64\n\
         [ \"$(readlink /proc/self/fd/0)\" = /dev/null ] || exit 65\n\
         [ $PIE_LOAD_TEST_BEHAVIOUR = stuck ] && trap '' TERM\n\
         PIE_LOAD_TEST_CONFIG=\"$4\" exec '{}' --exact stand_in --nocapture\n",
        this.display()
    );
    let source = folder.path().join("script");
    fs::write(&source, text).unwrap();
    // Written by another process: a file that a fork of this one still has open for writing cannot be run.
    let installed = Command::new("install")
        .args(["-m", "755"])
        .args([&source, &path])
        .status();
    assert!(installed.unwrap().success());
    path
}

/// One short row.
const SHORT: [&str; 7] = ["steps", "--batch", "3", "--context", "5", "--steps", "5"];

fn lengths(array: &Value) -> usize {
    array.as_array().map_or(0, Vec::len)
}

#[test]
fn steps_keep_every_token_in_its_place() {
    let line = "steps --batch 1,3,5,9 --context 7,20 --steps 6 --warm-up 2 --sampler mixed";
    let out = load("serve", &line.split(' ').collect::<Vec<_>>());
    assert!(out.success, "{}{}", out.stdout, out.stderr);
    let rows = out.json["steps"].as_array().unwrap();
    assert_eq!(rows.len(), 8);
    for row in rows {
        let (batch, context) = (
            row["batch"].as_u64().unwrap(),
            row["context"].as_u64().unwrap(),
        );
        let samples = &out.samples["steps"][format!("{batch}x{context}")];
        if batch == 9 {
            assert_eq!(row["skipped"], "9 requests in a frame, the driver has 5");
            assert!(samples.is_null() && row["round_trip_us"].is_null());
            continue;
        }
        assert!(row["skipped"].is_null(), "{row}");
        assert_eq!(lengths(&samples["round_trip_ns"]), 6);
        assert_eq!(lengths(&samples["client_ns"]), 6);
        for series in ["round_trip_ns", "client_ns"] {
            let samples = samples[series].as_array().unwrap();
            assert!(samples.iter().all(|sample| sample.as_u64() > Some(0)));
        }
        assert_eq!(row["fast"], true);
        assert!(row["round_trip_us"]["p99"].as_f64() >= row["round_trip_us"]["p50"].as_f64());
    }
    assert_eq!(out.json["commit"], "c0ffee");
    assert_eq!(out.json["exit"]["status"], "exit status: 0");
    assert_eq!(out.json["exit"]["region_left"], false);
    // Prompts of 20 tokens: at most two fit into 44 tokens.
    let prompts = out.frames.iter().filter(|frame| frame[1] > frame[0]);
    assert_eq!(prompts.map(|frame| frame[1]).max(), Some(40));
}

/// The stand-in holds every token against the one that it gave: those of archives, and where the next frame cannot be
/// made while one is on its way.
#[test]
fn throughput_serves_every_request_to_its_end() {
    for behaviour in ["serve", "archives", "one-slot"] {
        throughput(behaviour);
    }
}

fn throughput(behaviour: &str) {
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("lengths.json");
    let text =
        r#"{"prompts": [9, 1, 30, 4, 12, 2, 7, 16, 40], "outputs": [5, 20, 1, 11, 3, 2, 9, 8, 4]}"#;
    fs::write(&file, text).unwrap();
    let line = "throughput --requests 8 --repeats 2 --lengths";
    let mut arguments: Vec<&str> = line.split(' ').collect();
    arguments.push(file.to_str().unwrap());
    let out = load(behaviour, &arguments);
    assert!(out.success, "{}{}", out.stdout, out.stderr);
    let runs = out.json["throughput"].as_array().unwrap();
    assert_eq!(runs.len(), 2);
    for run in runs {
        assert_eq!(
            (&run["requests"], &run["output_tokens"]),
            (&8.into(), &59.into())
        );
        assert!(run["tokens_per_s"].as_f64().unwrap() > 0.0);
        assert!(run["client_us"]["p50"].as_f64().unwrap() > 0.0);
        assert!(run["client_us"]["p99"].as_f64() >= run["client_us"]["p50"].as_f64());
        // One token is sampled in every request of every frame.
        let share = |kind: &str, what: &str| run[kind][what].as_u64().unwrap();
        assert_eq!(
            share("decode", "requests") + share("with_prompts", "requests"),
            59
        );
        assert_eq!(share("decode", "tokens"), share("decode", "requests"));
    }
    let record = &out.samples["throughput"][1];
    let steps = runs[1]["decode"]["steps"].as_u64().unwrap()
        + runs[1]["with_prompts"]["steps"].as_u64().unwrap();
    for array in ["round_trip_ns", "client_ns", "requests", "tokens"] {
        assert_eq!(lengths(&record[array]) as u64, steps, "{array}");
    }
    assert_eq!(out.frames.len() as u64, 2 * steps);
    assert_eq!(out.frames.iter().map(|frame| frame[3]).sum::<u32>(), 2 * 59);
}

#[test]
fn drafts_change_no_token_and_are_counted() {
    let line = "drafts --draft-batch 1,3,9 --draft-repeats 2 --draft-prompt 7 --draft-output 30";
    let out = load("serve", &line.split(' ').collect::<Vec<_>>());
    assert!(out.success, "{}{}", out.stdout, out.stderr);
    assert_eq!(out.json["driver"]["options"][0], "spec_ngram_enabled=true");
    let rows = out.json["drafts"].as_array().unwrap();
    assert_eq!(rows.len(), 3);
    assert_eq!(
        rows[2]["skipped"],
        "9 requests in a frame, the driver has 5"
    );
    let mut drafted = 0;
    for (row, batch) in rows.iter().zip([1, 3]) {
        // The prompt's frame brings the first of 30 tokens.
        let agreement = serde_json::json!({"contexts": 2 * batch, "differ": 0, "equal": 1.0});
        assert_eq!(row["agreement"], agreement);
        assert_eq!(row["ratio"], row["ratio_of_new"]);
        for pair in row["repeats"].as_array().unwrap() {
            let number = |play: &str, what: &str| pair[play][what].as_u64().unwrap();
            let (with, without) = (|what| number("with", what), |what| number("without", what));
            assert_eq!(
                (with("tokens"), without("tokens")),
                (29 * batch, 29 * batch)
            );
            assert_eq!((without("steps"), without("drafted")), (29, 0));
            assert!(with("steps") < 29 && with("accepted") < with("drafted"));
            assert_eq!(with("requests") + with("accepted"), 29 * batch);
            drafted += with("drafted");
        }
    }
    assert_eq!(
        out.frames
            .iter()
            .map(|frame| u64::from(frame[4]))
            .sum::<u64>(),
        drafted
    );
    let samples = out.samples["drafts"].as_array().unwrap();
    assert_eq!(samples.len(), 4);
    assert_eq!(lengths(&samples[3]["without"]["round_trip_ns"]), 29);
}

#[test]
fn a_driver_that_ends_early_is_reported() {
    let out = load("die-early", &["steps"]);
    assert!(!out.success);
    let expected = "the driver ended (exit status: 9) before it was ready; its log ends so:";
    assert!(out.stderr.contains(expected), "{}", out.stderr);
    assert!(out.stderr.ends_with("no GPU here\n"), "{}", out.stderr);
}

#[test]
fn a_driver_that_is_never_ready_is_reported() {
    let out = load("never-ready", &["steps", "--ready-timeout-s", "0.5"]);
    assert!(!out.success);
    assert!(
        out.stderr.contains("not ready after 500ms"),
        "{}",
        out.stderr
    );
}

#[test]
fn a_strange_handshake_is_reported() {
    let out = load("gibberish", &["steps"]);
    assert!(!out.success);
    assert!(
        out.stderr.contains("the handshake has the line \"hello\""),
        "{}",
        out.stderr
    );
}

#[test]
fn a_driver_that_dies_while_it_serves_ends_the_run_and_keeps_its_figures() {
    let line = "steps --batch 1,2 --context 5 --steps 4 --warm-up 0";
    let out = load("die-later", &line.split(' ').collect::<Vec<_>>());
    assert!(!out.success);
    let expected = "the driver ended (exit status: 7) while it served; its log ends so:";
    assert!(out.stderr.contains(expected), "{}", out.stderr);
    // Five frames are one prompt and the first row.
    assert_eq!(lengths(&out.json["steps"]), 1);
}

#[test]
fn a_load_that_is_killed_has_written_its_rows_and_leaves_no_driver() {
    let line = "steps --batch 1,2 --context 5 --steps 4 --warm-up 0";
    let out = load("kill-later", &line.split(' ').collect::<Vec<_>>());
    assert!(!out.success && out.stderr.is_empty());
    assert_eq!(lengths(&out.json["steps"]), 1);
    assert_eq!(lengths(&out.samples["steps"]["1x5"]["round_trip_ns"]), 4);
}

#[test]
fn a_driver_that_is_stuck_is_killed() {
    let out = load("stuck", &[&SHORT[..], &["--timeout-s", "0.5"]].concat());
    assert!(!out.success);
    assert!(
        out.stderr
            .contains("alive but did not answer a frame within 500ms"),
        "{}",
        out.stderr
    );
    assert!(
        out.stdout
            .contains("SIGTERM: killed, because it was still there 5s"),
        "{}",
        out.stdout
    );
    assert!(
        out.stdout.contains("its region was left over"),
        "{}",
        out.stdout
    );
}

#[test]
fn an_emptied_request_is_reported() {
    let out = load("empties", &SHORT);
    assert!(!out.success);
    let expected = "the driver answered request 1 with 0 tokens, expected 1";
    assert!(out.stderr.contains(expected), "{}", out.stderr);
}
