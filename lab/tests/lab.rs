//! The lab judged by answers that are known, and by what it leaves behind.

use std::path::Path;
use std::process::{Command, Output, Stdio};

use draconis_objects::{CreateOptions, LayoutKind, Profile, Store};
use draconis_testkit::sim::SimDisk;
use serde_json::Value;

/// All experiments of the papers, and what else stands.
const EXPERIMENT_NAMES: &[&str] = &[
    "seqread",
    "timeseries",
    "latency",
    "caches",
    "channel",
    "isolation",
    "mem-good",
    "mem-bad",
    "mem-ugly",
    "mem-sweep",
    "mem-split",
    "fs-good",
    "fs-bad",
    "fs-ugly",
    "fs-sweep",
    "fs-split",
    "fs-parts",
    "fs-compete",
    "page-size",
    "write-mode",
    "parallel",
    "kv-async",
    "kv-sync",
    "kv-read",
    "kv-large",
    "kv-durable",
    "kv-bucket",
    "append-update",
    "profile",
    "objects",
    "mount",
    "tools",
    "killed",
    "fio-check",
];

fn lab_command(dir: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_draconis-lab"));
    command.args(arguments);
    if arguments.first() == Some(&"run") {
        command.arg("--dir").arg(dir).arg("--out").arg(dir.join("out"));
    }
    command
}

fn run_lab(dir: &Path, arguments: &[&str]) -> Output {
    lab_command(dir, arguments).output().unwrap()
}

/// The results of a run.
fn run(arguments: &[&str]) -> Value {
    let dir = tempfile::tempdir().unwrap();
    let all: Vec<&str> = ["run", "--json"].iter().chain(arguments).copied().collect();
    let output = run_lab(dir.path(), &all);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn result_points(results: &Value) -> impl Iterator<Item = &Value> {
    results["experiments"]
        .as_array()
        .unwrap()
        .iter()
        .flat_map(|one| one["points"].as_array().unwrap())
}

/// The medians of a metric and series.
fn result_medians(results: &Value, metric: &str, series: &str) -> Vec<f64> {
    let of = |p: &&Value| p["metric"] == metric && p["series"] == series;
    result_points(results).filter(of).map(|p| p["median"].as_f64().unwrap()).collect()
}

fn is_within(measured: f64, known: f64, part: f64) -> bool {
    (measured / known - 1.0).abs() <= part
}

#[test]
fn list_shows_published_results() {
    let dir = tempfile::tempdir().unwrap();
    let listed = run_lab(dir.path(), &["list", "--json"]);
    let listed: Value = serde_json::from_slice(&listed.stdout).unwrap();
    let names: Vec<&str> =
        listed.as_array().unwrap().iter().map(|one| one["name"].as_str().unwrap()).collect();
    for name in EXPERIMENT_NAMES {
        assert!(names.contains(name), "{name}");
    }
    assert!(
        listed.as_array().unwrap().iter().all(|one| !one["finding"].as_str().unwrap().is_empty())
    );
    let text = run_lab(dir.path(), &["list"]);
    let text = String::from_utf8_lossy(&text.stdout).into_owned();
    assert!(text.contains("objects"));
}

#[test]
fn injected_delays_are_measured_in_model_time() {
    let subject = "delay:read=1ms,write=200us,sync=5ms,clock=model";
    let results = run(&["latency", "append-update", "fs-parts", "--subject", subject]);
    let reads = result_medians(&results, "time", "");
    assert_eq!(reads.len(), 2000);
    assert!(reads.iter().all(|ns| is_within(*ns, 1e6, 0.05)));
    let rates = result_medians(&results, "rate", "");
    assert_eq!(rates.len(), 4);
    assert!(rates.iter().all(|rate| is_within(*rate, 1e9 / 5.2e6, 0.05)), "{rates:?}");
    for (part, known) in [("write call", 2e5), ("fsync call", 5e5)] {
        let parts = result_medians(&results, "parts", part);
        assert!(
            parts.len() == 3 && parts.iter().all(|ns| is_within(*ns, known, 0.05)),
            "{parts:?}"
        );
    }
}

#[test]
fn injected_delays_are_measured_in_real_time() {
    let small = ["--set", "reads=500", "--set", "file=64K"];
    let arguments = ["latency", "--subject", "delay:read=200us"];
    let results = run(&[&arguments[..], &small[..]].concat());
    let mut reads = result_medians(&results, "time", "");
    reads.sort_by(f64::total_cmp);
    // The least: a busy machine makes any of them longer than it was told to be.
    assert!(is_within(reads[0], 2e5, 0.05), "{}", reads[0]);
}

#[test]
fn cost_parts_sum_to_total() {
    let subjects = ["--subject", "dir", "--subject", "model:ssd", "--subject", "model:hdd"];
    let results = run(&[&["fs-parts", "--set", "writes=40"][..], &subjects[..]].concat());
    let adds = result_medians(&results, "adds", "");
    assert_eq!(adds.len(), 9);
    assert!(adds.iter().all(|adds| is_within(*adds, 100.0, 0.05)), "{adds:?}");
}

#[test]
fn page_size_of_models_is_inferred() {
    for page in [512u64, 1024, 2048, 4096, 8192, 16384] {
        let subject = format!("model:ssd,page={page}");
        let results = run(&["page-size", "--subject", &subject, "--set", "sizes=4096"]);
        let found = results["experiments"][0]["found"][0].as_str().unwrap();
        let name = match page {
            512 => "512 B".into(),
            page => format!("{} KiB", page / 1024),
        };
        assert!(found.contains(&format!("the page is {name}")), "{page}: {found}");
    }
}

#[test]
fn same_seed_gives_same_results_on_model() {
    let arguments = [
        "seqread",
        "timeseries",
        "fs-split",
        "write-mode",
        "parallel",
        "append-update",
        "profile",
        "--subject",
        "model:ssd",
        "--subject",
        "model:hdd",
        "--seed",
        "7",
    ];
    let (one, other) = (run(&arguments), run(&arguments));
    assert!(result_points(&one).count() > 100);
    assert!(result_points(&one).eq(result_points(&other)));
    let profiles = |results: &Value| {
        let all = results["experiments"].as_array().unwrap().iter();
        all.map(|one| one["profiles"].clone()).collect::<Vec<_>>()
    };
    assert_eq!(profiles(&one), profiles(&other));
}

/// What `draconis store create --profile` reads.
#[derive(serde::Deserialize)]
struct StoreProfileFile {
    layout: String,
    page_bytes: u32,
    segment_bytes: u32,
    queue_depth: u32,
}

#[test]
fn profile_file_is_accepted_by_store_create() {
    let dir = tempfile::tempdir().unwrap();
    let small = ["run", "profile", "--set", "requests=20"];
    let subjects = ["model:hdd", "model:ssd", "model:ssd,page=16K"];
    let subjects = subjects.map(|one| ["--subject", one]).concat();
    let printed = run_lab(dir.path(), &[&small[..], &subjects].concat());
    assert!(printed.status.success(), "{}", String::from_utf8_lossy(&printed.stderr));
    let printed = String::from_utf8_lossy(&printed.stdout).into_owned();
    let out = dir.path().join("out");
    let profile = |name: &str| {
        let path = out.join(name);
        let command = format!("draconis store create --profile {} STORE", path.display());
        assert!(printed.contains(&command), "{command}: {printed}");
        let mut read: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        assert_eq!(read["why"].as_array().unwrap().len(), 4, "{read}");
        serde_json::from_value::<StoreProfileFile>(read["profile"].take()).unwrap()
    };
    let page = std::fs::read_to_string(out.join("report.html")).unwrap();
    for (name, layout, page_bytes) in [
        ("profile-model-hdd.json", "log", 4096),
        ("profile-model-ssd.json", "cow", 4096),
        ("profile-model-ssd-page-16K.json", "cow", 16384),
    ] {
        let chosen = profile(name);
        assert_eq!((&*chosen.layout, chosen.page_bytes), (layout, page_bytes), "{name}");
        assert!(page.contains(&format!("href=\"{name}\"")), "{name}");
        let layout = if layout == "log" { LayoutKind::Log } else { LayoutKind::Cow };
        let StoreProfileFile { segment_bytes, queue_depth, .. } = chosen;
        let profile = Profile { layout, page_bytes, segment_bytes, queue_depth };
        let (disk, _) = SimDisk::hdd(64 << 30, 1);
        Store::create(disk, &CreateOptions { profile, id: 1 }).unwrap();
    }
}

/// The papers' shapes, on the devices that they were about.
#[test]
fn models_reproduce_published_shapes() {
    let models = ["--subject", "model:ssd", "--subject", "model:hdd"];
    let results =
        run(&[&["append-update", "parallel", "fs-split", "page-size"][..], &models].concat());
    let value = |metric: &str, subject: &str, series: &str, at: &dyn Fn(&Value) -> bool| {
        let of = |p: &&Value| {
            p["metric"] == metric && p["subject"] == subject && p["series"] == series && at(p)
        };
        result_points(&results).find(of).unwrap()["median"].as_f64().unwrap()
    };
    let append =
        |subject| value("rate", subject, "", &|p| p["label"].as_str() == Some("append 512 B"));
    let ratio = append("model:ssd") / append("model:hdd");
    assert!((100.0..500.0).contains(&ratio), "synchronous writes: {ratio}");
    let threads = |n: f64| value("rate", "model:ssd", "", &|p| p["x"] == n);
    assert!(threads(8.0) > 3.0 * threads(1.0), "parallel");
    assert!(is_within(threads(32.0), 175_000.0, 0.1), "{}", threads(32.0));
    let part = |series| value("split", "model:hdd", series, &|p| p["x"] == 4096.0);
    assert!(part("good") / part("bad") > 1000.0, "good : bad");
    let speed = |bytes: f64| value("speed", "model:ssd", "", &|p| p["x"] == bytes);
    assert!(speed(4096.0) > 1.5 * speed(3072.0) && speed(4096.0) > 1.5 * speed(5120.0), "the knee");
}

#[test]
fn unavailable_subjects_are_reported_as_skipped() {
    let results = run(&["page-size", "--subject", "dev:/dev/null"]);
    let needs = results["skipped"][0]["needs"].as_str().unwrap();
    assert!(needs.contains("no block device"), "{needs}");
    let dir = tempfile::tempdir().unwrap();
    let precious = dir.path().join("precious");
    std::fs::write(&precious, "precious").unwrap();
    let subject = format!("file:{}", precious.display());
    let results = run(&["page-size", "--subject", &subject]);
    assert!(results["skipped"][0]["needs"].as_str().unwrap().contains("--destroy"));
    assert_eq!(std::fs::read(&precious).unwrap(), b"precious");
}

#[test]
fn invalid_arguments_are_named() {
    let dir = tempfile::tempdir().unwrap();
    for (arguments, word) in [
        (&["run", "nothing"][..], "nothing"),
        (&["run", "latency", "--subject", "tape"], "tape"),
        (&["run", "latency", "--set", "wings=2"], "wings"),
        (&["run", "latency", "--set", "reads"], "reads"),
        (&["report", "/nowhere"], "nowhere"),
    ] {
        let output = run_lab(dir.path(), arguments);
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && errors.contains(word), "{arguments:?}: {errors}");
    }
}

#[test]
fn stopped_run_leaves_only_results() {
    let dir = tempfile::tempdir().unwrap();
    let arguments = ["run", "fs-bad", "--subject", "dir", "--set", "writes=10000000"];
    let mut child = lab_command(dir.path(), &arguments)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    // Once it has begun to write.
    let begun = || {
        let entries = std::fs::read_dir(dir.path()).unwrap();
        entries.flatten().any(|entry| entry.file_name() != "out")
    };
    draconis_testkit::wait::wait_until("the experiment begins", begun);
    draconis_testkit::wait::pause(
        "the experiment is at work",
        std::time::Duration::from_millis(50),
    );
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    let left: Vec<_> = std::fs::read_dir(dir.path()).unwrap().flatten().collect();
    assert_eq!(left.len(), 1, "{left:?}");
    let results = std::fs::read(dir.path().join("out/results.json")).unwrap();
    let results: Value = serde_json::from_slice(&results).unwrap();
    assert_eq!(results["interrupted"], true);
}

#[test]
fn compare_shows_both_results() {
    let (a, b) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    for (dir, page) in [(&a, "4K"), (&b, "4K")] {
        let subject = format!("model:ssd,page={page}");
        assert!(
            run_lab(dir.path(), &["run", "append-update", "--subject", &subject]).status.success()
        );
    }
    let (a, b) = (a.path().join("out"), b.path().join("out"));
    let output = run_lab(Path::new("/"), &["compare", a.to_str().unwrap(), b.to_str().unwrap()]);
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(printed.contains("0 of 4 values changed"), "{printed}");
}

/// As a reader sees it, where there is a browser.
#[test]
fn report_renders_in_browser() {
    let names = ["chromium", "chromium-browser", "google-chrome"];
    let there = |name: &&&str| Command::new(name).arg("--version").output().is_ok();
    let Some(browser) = names.iter().find(there) else {
        draconis_testkit::report_skipped("no chromium here to draw the report with");
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let models = ["--subject", "model:ssd", "--subject", "model:hdd"];
    let small = ["run", "fs-split", "parallel", "append-update", "timeseries"];
    assert!(run_lab(dir.path(), &[&small[..], &models].concat()).status.success());
    let page = format!("file://{}", dir.path().join("out/report.html").display());
    let drawn = Command::new(browser)
        .args(["--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"])
        .arg(format!("--user-data-dir={}", dir.path().join("profile").display()))
        .args(["--window-size=500,1000", "--dump-dom", &page])
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&drawn.stderr).into_owned();
    assert!(!errors.contains("CONSOLE"), "{errors}");
    let page = String::from_utf8_lossy(&drawn.stdout).into_owned();
    let figures: Vec<&str> = page
        .split("<figure>")
        .skip(1)
        .map(|rest| rest.split("</figure>").next().unwrap())
        .collect();
    assert_eq!(figures.len(), 5, "{errors}");
    for figure in figures {
        assert!(figure.matches("class=\"mark\"").count() >= 4, "an empty plot: {figure}");
    }
}
