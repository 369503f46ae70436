//! `--follow`: two processes read a store while a third one writes it, is killed, and starts again.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use draconis_testkit::wait;

use crate::common::bucket::TestBucket;
use crate::common::wait_until;
use draconis_bucket::{BucketDisk, BucketOptions, ObjectStoreBucket};
use draconis_objects::Store;
use draconis_objects::kv::{Batch, Kv};

/// Keys that commits write in turn, beside the first and the last key.
const KEYS: u64 = 50;
/// Commits that a writer makes before it waits to be killed: they fill a fifth of the store, so that
/// no follower, however slow, is overtaken by the reuse of what it reads.
const MAX_COMMITS_PER_LIFE: u64 = 400;

/// Store that this test program writes instead of testing.
const WRITER_ENV: &str = "DRACONIS_TEST_WRITER";

fn now_us() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_micros() as u64
}

/// The writer: commits without end. Does nothing when it is run as a test.
#[test]
fn writer_process() {
    let Ok(address) = std::env::var(WRITER_ENV) else { return };
    let store: Arc<Store> = match address.contains("://") {
        true => {
            let engine = ObjectStoreBucket::open(&address, false, Duration::from_secs(5)).unwrap();
            let options = BucketOptions { token: now_us().into(), ..BucketOptions::default() };
            let disk = BucketDisk::open(Arc::new(engine), &address, &options).unwrap();
            Store::open(Arc::new(disk), &Default::default()).unwrap()
        }
        false => draconis_access::stores::open_exclusive(Path::new(&address), false).unwrap(),
    };
    let kv = Kv::new(store);
    let last = kv.get(b"a").unwrap();
    let last = last.map_or(0, |value| parse_value(std::str::from_utf8(&value).unwrap()).0);
    for nth in last + 1..=last + MAX_COMMITS_PER_LIFE {
        let value = format!("{nth} {} {}", now_us(), "x".repeat((nth * 7919 % 9000) as usize));
        let mut batch = Batch::new();
        for key in ["a", &format!("k{:03}", nth % KEYS), "z"] {
            batch.put(key.as_bytes(), value.as_bytes());
        }
        let ticket = kv.write(batch).map_err(|refused| refused.1).unwrap();
        kv.wait(ticket).unwrap();
        draconis_testkit::wait::pause("followers read between commits", Duration::from_millis(2));
    }
    loop {
        std::thread::park();
    }
}

/// Returns the number and the time of a commit.
fn parse_value(value: &str) -> (u64, u64) {
    let mut words = value.split(' ').map(|word| word.parse().unwrap());
    (words.next().unwrap(), words.next().unwrap())
}

fn start_writer(address: &str, place: &TestBucket) -> Child {
    let mut command = draconis_testkit::child_test!(writer_process);
    command.env(WRITER_ENV, address);
    command.envs(place.environment().iter().cloned());
    command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
}

/// A view that a follower printed, and when.
struct View {
    commit: u64,
    committed_us: u64,
    shown_us: u64,
}

/// A running `kv scan --follow`.
struct Follower {
    child: Child,
    views: Receiver<View>,
    stderr: Arc<Mutex<String>>,
}

impl Follower {
    fn start(place: &TestBucket, store: &str, seconds: &str) -> Self {
        let arguments = ["kv", "scan", "--deadline", "2", "--follow", seconds, store];
        let mut child = place.command(&arguments).spawn().unwrap();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        let (send, views) = channel();
        std::thread::spawn(move || {
            let mut pairs: Vec<(String, u64, u64)> = vec![];
            let mut line = String::new();
            while out.read_line(&mut line).unwrap_or(0) > 0 {
                match line.split_once('\t') {
                    Some((key, value)) => {
                        let (commit, at) = parse_value(
                            value.trim_end_matches('\n').trim_end_matches('x').trim_end(),
                        );
                        pairs.push((key.to_owned(), commit, at));
                    }
                    None if pairs.is_empty() => {}
                    None => {
                        check_prefix(&pairs);
                        let (_, commit, committed_us) = pairs[0];
                        if send.send(View { commit, committed_us, shown_us: now_us() }).is_err() {
                            return;
                        }
                        pairs.clear();
                    }
                }
                line.clear();
            }
        });
        let stderr = Arc::new(Mutex::new(String::new()));
        let (mut from, into) = (child.stderr.take().unwrap(), stderr.clone());
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(len @ 1..) = from.read(&mut bytes) {
                into.lock().unwrap().push_str(&String::from_utf8_lossy(&bytes[..len]));
            }
        });
        Self { child, views, stderr }
    }

    /// Waits for a view of this commit or a later one; returns all views until then.
    fn wait_for(&self, commit: u64) -> Vec<View> {
        let mut views = vec![];
        while views.last().is_none_or(|view: &View| view.commit < commit) {
            let view = wait::receive(&self.views);
            views.push(view.unwrap_or_else(|_| {
                panic!("no view of commit {commit}: {}", self.stderr.lock().unwrap())
            }));
        }
        views
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A view has all commits up to its newest one.
fn check_prefix(pairs: &[(String, u64, u64)]) {
    let (last, end) = (pairs[0].1, pairs.last().unwrap());
    assert_eq!((pairs[0].0.as_str(), end.0.as_str(), end.1), ("a", "z", last));
    assert_eq!(pairs.len() as u64, 2 + last.min(KEYS));
    for (key, commit, _) in &pairs[1..pairs.len() - 1] {
        let key: u64 = key[1..].parse().unwrap();
        assert_eq!(*commit, last - (last % KEYS + KEYS - key) % KEYS, "key {key} of {last}");
    }
}

/// Prints how long it took until commits were shown. Those between two views are spread evenly.
fn print_staleness(what: &str, seconds: &str, views: &[View]) {
    let mut ages: Vec<u64> = vec![];
    for two in views.windows(2) {
        let (from, to) = (two[0].committed_us, two[1].committed_us);
        let times = (1..=20).map(|part| from + to.saturating_sub(from) * part / 20);
        ages.extend(times.map(|at| two[1].shown_us.saturating_sub(at)));
    }
    ages.sort_unstable();
    let at = |percent: usize| ages[(ages.len() - 1) * percent / 100] as f64 / 1000.0;
    println!(
        "{what}, polled every {seconds} s: {} views, a commit is shown after {:.0} ms (p50), {:.0} ms (p99)",
        views.len(),
        at(50),
        at(99)
    );
}

/// Takes a store away (true), or brings it back.
type Outage<'a> = dyn FnMut(&mut TestBucket, bool) + 'a;

/// Two followers of a writer that is killed and started again; then the store goes
/// away and comes back.
fn test_followers(place: &mut TestBucket, store: &str, outage: Option<&mut Outage<'_>>) {
    let is_long = std::env::var_os("DRACONIS_FOLLOW_LONG").is_some();
    let (seconds, rounds, round) = match is_long {
        true => ("1", 6, Duration::from_secs(10)),
        false => ("0.1", 3, Duration::from_millis(700)),
    };
    place.run_ok(&["store", "create", store, "--size", "32M"]);
    let followers = [0, 1].map(|_| Follower::start(place, store, seconds));
    let mut views = [vec![], vec![]];
    let mut seen = 0;
    for _ in 0..rounds {
        let mut writer = start_writer(store, place);
        for (follower, views) in followers.iter().zip(&mut views) {
            views.extend(follower.wait_for(seen + 1));
        }
        draconis_testkit::wait::pause("the kill comes at any moment", round);
        writer.kill().unwrap();
        writer.wait().unwrap();
        // No follower is behind once the writer has stopped.
        let value = place.run_ok(&["kv", "get", store, "a"]);
        seen = parse_value(value.trim_end_matches('x').trim_end()).0;
        for (follower, views) in followers.iter().zip(&mut views) {
            views.extend(follower.wait_for(seen));
        }
    }
    for views in &views {
        assert!(views.windows(2).all(|two| two[0].commit < two[1].commit), "a view went back");
        print_staleness(store, seconds, views);
    }
    for follower in &followers {
        assert_eq!(*follower.stderr.lock().unwrap(), "");
    }
    let Some(outage) = outage else { return };
    outage(place, true);
    for follower in &followers {
        wait_until("it says that the store is away", || {
            !follower.stderr.lock().unwrap().is_empty()
        });
    }
    outage(place, false);
    let mut writer = start_writer(store, place);
    followers.iter().for_each(|follower| drop(follower.wait_for(seen + 1)));
    writer.kill().unwrap();
    writer.wait().unwrap();
    for follower in &followers {
        let errors = follower.stderr.lock().unwrap().clone();
        assert!(errors.contains("it can be read again"), "{errors}");
    }
}

#[test]
fn followers_of_a_file() {
    let mut place = TestBucket::directory_bucket();
    let file = place.draconis.path("s.store");
    let (file, away) = (file.to_str().unwrap().to_owned(), place.draconis.path("away"));
    test_followers(&mut place, &file, None);
    // Not of a file by another name, but of what is there: a store of another size.
    let follower = Follower::start(&place, &file, "0.1");
    follower.wait_for(1);
    place.run_ok(&["store", "grow", &file, "48M"]);
    let mut writer = start_writer(&file, &place);
    let before = follower.wait_for(1).pop().unwrap().commit;
    follower.wait_for(before + 1);
    writer.kill().unwrap();
    writer.wait().unwrap();
    // While a program writes, other commands say how to read.
    let _writer = draconis_access::stores::open_exclusive(Path::new(&file), false).unwrap();
    let errors = place.run_failing(&["kv", "get", &file, "a"]);
    assert!(errors.contains("is in use") && errors.contains("--follow"), "{errors}");
    assert!(!away.exists());
}

#[test]
fn followers_of_a_bucket_in_a_directory() {
    let mut place = TestBucket::directory_bucket();
    let store = place.address.clone();
    let (dir, away) = (place.draconis.path("bucket"), place.draconis.path("away"));
    let mut outage = |_: &mut TestBucket, is_away: bool| match is_away {
        true => std::fs::rename(&dir, &away).unwrap(),
        false => {
            let _ = std::fs::remove_dir_all(&dir);
            std::fs::rename(&away, &dir).unwrap();
        }
    };
    test_followers(&mut place, &store, Some(&mut outage));
}

#[test]
#[ignore = "tools: versitygw"]
fn followers_of_a_bucket_on_a_server() {
    let Some(mut place) = TestBucket::server_bucket() else { return };
    let store = place.address.clone();
    let mut back = None;
    let mut outage = |place: &mut TestBucket, is_away: bool| match is_away {
        true => back = Some(place.stop_server()),
        false => back.take().unwrap()(place),
    };
    test_followers(&mut place, &store, Some(&mut outage));
}

#[test]
fn values_lists_and_wrong_intervals() {
    let place = TestBucket::directory_bucket();
    let file = place.draconis.path("s.store");
    let file = file.to_str().unwrap();
    place.run_ok(&["store", "create", file, "--size", "16M", "--sparse", "--layout", "cow"]);
    let shown = |arguments: &[&str]| {
        let mut child = place.command(arguments).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        (child, lines)
    };
    let (mut get, mut values) = shown(&["kv", "get", "--follow", "0.05", file, "colour"]);
    let (mut list, mut objects) = shown(&["store", "ls", "--follow", "0.05", file]);
    assert_eq!(values.next().unwrap().unwrap(), "");
    assert_eq!(objects.next().unwrap().unwrap(), "");
    place.run_ok(&["kv", "put", file, "colour", "green"]);
    assert_eq!(values.next().unwrap().unwrap(), "green");
    place.run_ok(&["store", "disk", file, "d", "1M"]);
    assert!(objects.next().unwrap().unwrap().ends_with("\td"));
    for child in [&mut get, &mut list] {
        child.kill().unwrap();
        child.wait().unwrap();
    }
    for wrong in ["0", "-1", "x", "nan", "1e9"] {
        let output = place.run(&["kv", "get", &format!("--follow={wrong}"), file, "a"]);
        assert_eq!(output.status.code(), Some(2), "{wrong}");
    }
}
