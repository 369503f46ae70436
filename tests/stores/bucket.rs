//! Stores in buckets on the command line: in a directory, and on a real server (versitygw) if it
//! is installed.

use std::net::TcpListener;
use std::process::Command;
use std::time::Duration;

use crate::common::bucket::TestBucket;

/// All commands of a store.
fn test_all_store_commands(place: &TestBucket) {
    let (store, draconis) = (&place.address[..], &place.draconis);
    let said = place.run_failing(&["kv", "get", store, "a"]);
    assert!(said.contains("store create") && said.contains("makes"), "{said}");
    let said = place.run_failing(&["store", "create", store]);
    assert!(said.contains("--size is needed"), "{said}");
    let said = place.run_ok(&["store", "create", store, "--size", "64M"]);
    assert!(said.contains("layout bucket"), "{said}");
    let said = place.run_failing(&["store", "create", store, "--size", "64M"]);
    assert!(said.contains("holds a store; --force overwrites it"), "{said}");

    let (file, copy) = (draconis.path("file"), draconis.path("copy"));
    let bytes: Vec<u8> = (0..9_000_000u32).map(|at| (at.wrapping_mul(at) >> 7) as u8).collect();
    std::fs::write(&file, &bytes).unwrap();
    let (file, copy) = (file.to_str().unwrap(), copy.to_str().unwrap());
    let id = place.run_ok(&["store", "put", store, "new", file]);
    let id = id.trim();
    place.run_ok(&["store", "get", store, id, copy]);
    assert!(std::fs::read(copy).unwrap() == bytes);
    place.run_ok(&["store", "append", store, id, file]);
    assert_eq!(place.run_ok(&["store", "ls", store]), format!("{id}\t18000000\n"));

    let lines: String = (0..20_000).map(|nth| format!("key {nth:05}\tvalue {nth}\n")).collect();
    let input = draconis.path("lines");
    std::fs::write(&input, &lines).unwrap();
    let output = place.run(&["kv", "load", "--stats", store, input.to_str().unwrap()]);
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success() && said.contains(" PUT, "), "{said}");
    assert_eq!(place.run_ok(&["kv", "scan", store]), lines);
    place.run_ok(&["kv", "del", store, "key 00000", "key 19999"]);
    let said = place.run_failing(&["kv", "get", store, "key 00000"]);
    assert!(said.contains("there is no key key 00000"), "{said}");
    assert_eq!(place.run_ok(&["kv", "get", store, "key 00001"]), "value 1");
    place.run_ok(&["store", "check", store]);

    place.run_ok(&["store", "grow", store, "96M"]);
    place.run_ok(&["store", "check", store]);
    place.run_ok(&["store", "rm", store, id]);
    place.run_ok(&["store", "shrink", store, "48M"]);
    place.run_ok(&["store", "check", store]);
    let info = place.run_ok(&["store", "info", store]);
    assert!(info.contains("length        48"), "{info}");
    let saved = draconis.path("saved.store");
    let saved = saved.to_str().unwrap();
    place.run_ok(&["store", "salvage", store, saved]);
    assert_eq!(place.run_ok(&["kv", "scan", saved]), place.run_ok(&["kv", "scan", store]));
    let said = place.run_failing(&["store", "probe", store]);
    assert!(said.contains("a bucket is not measured"), "{said}");
}

/// A killed command loses no earlier data.
fn test_killed_command_keeps_data(place: &TestBucket) {
    let (store, draconis) = (&place.address[..], &place.draconis);
    place.run_ok(&["store", "create", store, "--size", "64M"]);
    let input = draconis.path("lines");
    for round in 0..8u64 {
        let lines: String = (0..30_000).map(|nth| format!("{nth:05}\tround {round}\n")).collect();
        std::fs::write(&input, &lines).unwrap();
        let mut child =
            place.command(&["kv", "load", store, input.to_str().unwrap()]).spawn().unwrap();
        draconis_testkit::wait::pause(
            "the kill comes at any moment",
            Duration::from_millis(40 * round),
        );
        let _ = child.kill();
        child.wait().unwrap();
        place.run_ok(&["store", "check", store]);
        let key = format!("done {round}");
        place.run_ok(&["kv", "put", store, &key, "yes"]);
        for before in 0..=round {
            assert_eq!(place.run_ok(&["kv", "get", store, &format!("done {before}")]), "yes");
        }
    }
}

/// A killed command with a journal loses no earlier data, and the next command uploads the rest of
/// the journal.
fn test_killed_command_with_journal(place: &TestBucket) {
    let (store, draconis) = (&place.address[..], &place.draconis);
    let journal = format!("{},32M", draconis.path("journal").display());
    place.run_ok(&["store", "create", "--journal", &journal, store, "--size", "64M"]);
    let input = draconis.path("lines");
    for round in 0..4u64 {
        let lines: String = (0..30_000).map(|nth| format!("{nth:05}\tround {round}\n")).collect();
        std::fs::write(&input, lines).unwrap();
        let load = ["kv", "load", "--journal", &journal, store, input.to_str().unwrap()];
        let mut child = place.command(&load).spawn().unwrap();
        draconis_testkit::wait::pause(
            "the kill comes at any moment",
            Duration::from_millis(60 * round),
        );
        let _ = child.kill();
        child.wait().unwrap();
        let key = format!("done {round}");
        place.run_ok(&["kv", "put", "--journal", &journal, store, &key, "yes"]);
        place.run_ok(&["store", "check", store]);
        for before in 0..=round {
            assert_eq!(place.run_ok(&["kv", "get", store, &format!("done {before}")]), "yes");
        }
    }
    // The journal was emptied.
    place.run_ok(&["kv", "put", store, "key", "value"]);
    let letters = draconis.path("letters");
    std::fs::write(&letters, "dear").unwrap();
    let said =
        place.run_failing(&["kv", "put", "--journal", letters.to_str().unwrap(), store, "a", "b"]);
    assert!(said.contains("letters is no journal") && said.contains("left as it is"), "{said}");
    assert_eq!(std::fs::read(&letters).unwrap(), b"dear");
}

/// Of concurrent writers, those that are fenced report the winner.
fn test_concurrent_writers_are_fenced(place: &TestBucket) {
    let (store, draconis) = (&place.address[..], &place.draconis);
    place.run_ok(&["store", "create", store, "--size", "64M"]);
    for round in 0..6 {
        let race = |nth: u32| {
            let (input, key) = (draconis.path(&format!("lines {nth}")), format!("{round} {nth}"));
            let lines: String = (0..9000).map(|line| format!("{key} {line:04}\tvalue\n")).collect();
            std::fs::write(&input, lines).unwrap();
            let child =
                place.command(&["kv", "load", store, input.to_str().unwrap()]).spawn().unwrap();
            (key, child)
        };
        let children = [race(1), race(2), race(3)];
        let mut won = 0;
        for (key, child) in children {
            let output = child.wait_with_output().unwrap();
            let said = String::from_utf8(output.stderr).unwrap();
            match output.status.success() {
                true => {
                    won += 1;
                    let lines = place.run_ok(&["kv", "scan", store, "--prefix", &key]);
                    assert_eq!(lines.lines().count(), 9000, "{key} was loaded");
                }
                false => assert!(said.contains("was taken over by"), "{said}"),
            }
        }
        assert!(won > 0, "none won round {round}");
        place.run_ok(&["store", "check", store]);
    }
}

#[test]
fn killed_journal_commands_lose_nothing_in_directory() {
    test_killed_command_with_journal(&TestBucket::directory_bucket());
}

#[test]
#[ignore = "tools: versitygw"]
fn killed_journal_commands_lose_nothing_on_server() {
    TestBucket::server_bucket().iter().for_each(test_killed_command_with_journal);
}

#[test]
fn all_store_commands_work_in_directory() {
    test_all_store_commands(&TestBucket::directory_bucket());
}

#[test]
fn killed_command_loses_nothing_in_directory() {
    test_killed_command_keeps_data(&TestBucket::directory_bucket());
}

#[test]
fn concurrent_writers_are_fenced_in_directory() {
    test_concurrent_writers_are_fenced(&TestBucket::directory_bucket());
}

#[test]
#[ignore = "tools: versitygw"]
fn all_store_commands_work_on_server() {
    TestBucket::server_bucket().iter().for_each(test_all_store_commands);
}

#[test]
#[ignore = "tools: versitygw"]
fn killed_command_loses_nothing_on_server() {
    TestBucket::server_bucket().iter().for_each(test_killed_command_keeps_data);
}

#[test]
#[ignore = "tools: versitygw"]
fn concurrent_writers_are_fenced_on_server() {
    TestBucket::server_bucket().iter().for_each(test_concurrent_writers_are_fenced);
}

#[test]
fn invalid_bucket_urls_are_reported() {
    let place = TestBucket::directory_bucket();
    for (address, why) in [
        ("ftp://host/x", "ftp:// is not known; s3://, gs://, az:// and file:/// are"),
        ("s3://", "no bucket is named"),
        ("file://relative", "an absolute path"),
        ("file:///no/such/directory", "no such directory"),
    ] {
        let said = place.run_failing(&["kv", "get", address, "a"]);
        assert!(said.contains(why), "{said}");
    }
    // Nothing listens on this port.
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let mut command = place.command(&["store", "ls", "--deadline", "1", "s3://bucket/x"]);
    command.env("AWS_ENDPOINT_URL", format!("http://127.0.0.1:{port}"));
    command.env("AWS_ACCESS_KEY_ID", "a").env("AWS_SECRET_ACCESS_KEY", "b");
    let output = command.output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("listing s3://bucket/x") && said.contains("--deadline"), "{said}");
}

/// Prefixes with characters that URLs must encode.
const SPECIAL_PREFIXES: [&str; 7] =
    ["tilde~", "ünï", "x#y", "50%", "q[1]*?", "two words/+&=", "%41"];

#[test]
#[ignore = "tools: versitygw"]
fn special_characters_in_prefix_are_accepted() {
    let Some(place) = TestBucket::server_bucket() else { return };
    for prefix in SPECIAL_PREFIXES {
        let address = format!("s3://bucket/{prefix}");
        place.run_ok(&["store", "create", &address, "--size", "16M"]);
        place.run_ok(&["kv", "put", &address, "a", prefix]);
    }
    for prefix in SPECIAL_PREFIXES {
        assert_eq!(place.run_ok(&["kv", "get", &format!("s3://bucket/{prefix}"), "a"]), prefix);
    }
    let said = place.run_failing(&["store", "create", "s3://bucket/a/../b", "--size", "16M"]);
    assert!(said.contains("'..' cannot be in a prefix"), "{said}");
}

/// Returns a command without the credentials of the tests, with its own home directory.
fn command_with_home_dir(place: &TestBucket, arguments: &[&str]) -> Command {
    let mut command = place.command(arguments);
    let ours = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
    for name in ours.filter(|name| name.starts_with("AWS_") && name != "AWS_ENDPOINT_URL") {
        command.env_remove(name);
    }
    for name in ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"] {
        command.env_remove(name);
    }
    command.env("HOME", place.draconis.make_dir("home"));
    command
}

#[test]
#[ignore = "tools: versitygw"]
fn aws_credential_files_are_read() {
    let Some(place) = TestBucket::server_bucket() else { return };
    let aws = place.draconis.make_dir("home").join(".aws");
    std::fs::create_dir(&aws).unwrap();
    let keys = "aws_access_key_id = access\naws_secret_access_key = secret-of-a-test\n";
    std::fs::write(aws.join("credentials"), format!("[work]\n{keys}")).unwrap();
    std::fs::write(aws.join("config"), "[profile work]\nregion = us-east-1\n").unwrap();
    let create = ["store", "create", "s3://bucket/x", "--size", "16M"];
    let output =
        command_with_home_dir(&place, &create).env("AWS_PROFILE", "work").output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let fails = |name: &str, value: &str| {
        let output = command_with_home_dir(&place, &["store", "ls", "s3://bucket/x"])
            .env(name, value)
            .output();
        let output = output.unwrap();
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    let said = fails("AWS_PROFILE", "play");
    assert!(said.contains("no profile 'play'") && said.contains(".aws/config"), "{said}");
    std::fs::write(aws.join("config"), "[default]\nsso_session = x\n").unwrap();
    let said = fails("AWS_REGION", "us-east-1");
    assert!(said.contains("aws configure export-credentials"), "{said}");
    std::fs::write(aws.join("config"), "nothing\n").unwrap();
    let said = fails("AWS_REGION", "us-east-1");
    assert!(said.contains(".aws/config: line 1 is neither"), "{said}");
    // As for a build in a container.
    let file = place.draconis.path("keys");
    std::fs::write(&file, format!("[default]\nregion = us-east-1\n{keys}")).unwrap();
    let mut command = command_with_home_dir(&place, &["store", "ls", "s3://bucket/x"]);
    command.env("AWS_SHARED_CREDENTIALS_FILE", &file).env("AWS_CONFIG_FILE", "/dev/null");
    let output = command.output().unwrap();
    assert!(output.status.success(), "{output:?}");
}

#[test]
fn missing_credentials_are_reported_at_once() {
    let place = TestBucket::directory_bucket();
    for disabled in ["false", "true"] {
        let mut command = command_with_home_dir(&place, &["store", "ls", "s3://bucket/x"]);
        command.env("AWS_EC2_METADATA_DISABLED", disabled);
        // This address neither answers nor refuses connections.
        command.env("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://192.0.2.1");
        let output = command.output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        for named in
            ["AWS_ACCESS_KEY_ID", "AWS_PROFILE", "home/.aws/credentials", "home/.aws/config"]
        {
            assert!(output.status.code() == Some(1) && said.contains(named), "{said}");
        }
    }
}
