//! The arrows between the crates, and what they promise of unsafe code and licences.
//!
//! Cargo says who uses whom; the table says who may (ARCHITECTURE.md, "Crates and dependencies").

use std::collections::BTreeSet;
use std::process::Command;

/// Each crate and the crates of ours that it may use.
const MAY_USE: &[(&str, &[&str])] = &[
    ("exchange", &[]),
    ("device", &["exchange"]),
    ("container", &["device", "exchange"]),
    ("ext", &["device", "exchange"]),
    ("objects", &["device", "exchange"]),
    ("bucket", &["device", "exchange"]),
    ("service", &["container", "device", "exchange", "ext", "objects"]),
    ("front", &["exchange"]),
    ("access", &["container", "device", "exchange", "ext", "objects", "service"]),
    ("capi", &["access", "exchange", "ext", "objects"]),
    ("lab", &["device", "exchange", "ext", "front", "objects", "service"]),
    // Stores that others wrote, for the lab, which starts it as a program.
    ("peers", &["bucket", "device", "objects"]),
    (
        "",
        &[
            "access",
            "bucket",
            "container",
            "device",
            "exchange",
            "ext",
            "front",
            "objects",
            "service",
        ],
    ),
];

/// Licences that a dependency may have.
const LICENCES: &[&str] = &[
    "MIT",
    "Apache-2.0",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "ISC",
    "Unicode-3.0",
    "Unlicense",
    "Zlib",
    "BSL-1.0",
    "LLVM-exception",
    "CC0-1.0",
    "0BSD",
    "MIT-0",
];

fn metadata() -> serde_json::Value {
    // What other platforms would need was never fetched.
    let platform = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version=1", "--locked", "--offline"])
        .args(["--filter-platform", &platform])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// `draconis-ext` is `ext`, and `draconis` itself is the empty name.
fn ours(name: &str) -> Option<&str> {
    if name == "draconis" { Some("") } else { name.strip_prefix("draconis-") }
}

#[test]
fn no_crate_uses_another_against_the_arrows() {
    let metadata = metadata();
    let mut wrong = vec![];
    for package in metadata["packages"].as_array().unwrap() {
        let Some(name) = ours(package["name"].as_str().unwrap()) else { continue };
        let Some((_, may)) = MAY_USE.iter().find(|(crate_name, _)| *crate_name == name) else {
            wrong.push(format!("{name} is not in the table of arrows"));
            continue;
        };
        for dependency in package["dependencies"].as_array().unwrap() {
            let used = dependency["name"].as_str().unwrap();
            // What a crate's own tests use binds no user of it.
            if !dependency["kind"].is_null() {
                continue;
            }
            if let Some(used) = ours(used)
                && !may.contains(&used)
            {
                wrong.push(format!("{name} must not use {used}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn every_dependency_has_a_permissive_licence() {
    let metadata = metadata();
    for package in metadata["packages"].as_array().unwrap() {
        let name = &package["name"];
        let licence =
            package["license"].as_str().unwrap_or_else(|| panic!("{name} has no licence"));
        // An expression: alternatives of which one, or parts of which all, must be allowed.
        let allowed = licence.split(" OR ").flat_map(|part| part.split('/')).any(|alternative| {
            let names = alternative.split([' ', '(', ')']).filter(|word| !word.is_empty());
            let names: BTreeSet<&str> =
                names.filter(|word| !["AND", "WITH"].contains(word)).collect();
            names.iter().all(|name| LICENCES.contains(name))
        });
        assert!(allowed, "{name}: {licence}");
    }
}

/// The crates that are for others.
const PUBLISHED: &[&str] = &["exchange", "device", "ext", "objects"];

#[test]
fn what_is_published_says_what_it_is_and_needs_nothing_of_ours_that_is_not() {
    for package in metadata()["packages"].as_array().unwrap() {
        let Some(name) = ours(package["name"].as_str().unwrap()) else { continue };
        let is_published = package["publish"].is_null();
        assert_eq!(is_published, PUBLISHED.contains(&name), "{name}: publish");
        if !is_published {
            continue;
        }
        for field in ["description", "license", "readme", "rust_version"] {
            assert!(package[field].is_string(), "{name} has no {field}");
        }
        assert!(!package["keywords"].as_array().unwrap().is_empty(), "{name} has no keywords");
        for dependency in package["dependencies"].as_array().unwrap() {
            let Some(used) = ours(dependency["name"].as_str().unwrap()) else { continue };
            // Tests are not published.
            if dependency["kind"].is_null() {
                assert!(PUBLISHED.contains(&used), "{name} needs {used}, which is not published");
                assert_ne!(dependency["req"], "*", "{name} takes any version of {used}");
            }
        }
    }
}

/// Whatever a command or a library overwrites was compared with what it reads before.
#[test]
fn files_of_the_host_are_overwritten_in_one_place() {
    const PLACE: &str = "crates/access/src/destination.rs";
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut stack: Vec<_> = ["src", "crates/access/src", "crates/capi/src", "python/src"]
        .map(|at| root.join(at))
        .into();
    let mut found = BTreeSet::new();
    while let Some(path) = stack.pop() {
        if path.is_dir() {
            stack.extend(std::fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path()));
            continue;
        }
        let text = std::fs::read_to_string(&path).unwrap();
        let code = text.split("#[cfg(test)]").next().unwrap();
        let opens = ["File::create(", ".create(true)", ".truncate(true)", "OFlags::TRUNC"];
        let writes = code.matches("std::fs::write(").count();
        // What the front tells the kernel to read ahead is no file.
        let writes = writes - code.matches("std::fs::write(&file, READ_AHEAD_KIB").count();
        if writes > 0 || opens.iter().any(|word| code.contains(word)) {
            found.insert(path.strip_prefix(root).unwrap().to_string_lossy().into_owned());
        }
    }
    assert_eq!(found, BTreeSet::from([PLACE.to_owned()]));
}

/// Where unsafe code may be. The first of them are in ARCHITECTURE.md, the tests are not.
const UNSAFE: &[&str] = &[
    "crates/exchange/",
    "crates/device/src/uring.rs",
    "crates/service/src/sandbox.rs",
    "crates/service/src/connection.rs",
    "crates/service/src/oplog.rs",
    "crates/service/src/loop_device.rs",
    "crates/capi/src/raw.rs",
    "crates/peers/src/cxx.rs",
    "crates/peers/src/lmdb.rs",
    "crates/peers/src/mapping.rs",
    // Attacks it.
    "crates/service/tests/sandbox.rs",
    // Asks the kernel what no library passes on as it is.
    "tests/exact/sys.rs",
    // Gives both sides of a session one memory.
    "tests/common/route.rs",
    "crates/ext/tests/matrix/ioctl.rs",
];

fn read(path: &str) -> String {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    std::fs::read_to_string(root.join(path)).unwrap()
}

#[test]
fn the_architecture_names_these_arrows_and_addresses() {
    let page = read("ARCHITECTURE.md");
    for (name, may) in MAY_USE {
        let beginning = match *name {
            "" => "| `draconis` (root) |".to_owned(),
            name => format!("| `{name}` |"),
        };
        let row = page.lines().find(|line| line.starts_with(&beginning));
        let row = row.unwrap_or_else(|| panic!("ARCHITECTURE.md has no row {beginning}"));
        let uses = row.split('|').nth(3).unwrap().trim();
        let wanted = if may.is_empty() { "–".to_owned() } else { may.join(", ") };
        assert_eq!(uses, wanted, "what {beginning} uses");
    }
    let list = page.lines().find(|line| line.starts_with("Unsafe code is in")).unwrap();
    for address in UNSAFE.iter().filter(|address| !address.contains("tests/")) {
        assert!(list.contains(&format!("`{address}`")), "unsafe code in {address}");
    }
}

#[test]
fn every_test_is_in_the_list_of_tests() {
    let (root, list) = (std::path::Path::new(env!("CARGO_MANIFEST_DIR")), read("docs/tests.md"));
    let crates = std::fs::read_dir(root.join("crates")).unwrap();
    let dirs = crates.map(|entry| entry.unwrap().path().join("tests")).filter(|dir| dir.is_dir());
    for dir in dirs.chain([root.join("tests")]) {
        for entry in std::fs::read_dir(&dir).unwrap() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            let is_test = name != "common" && (name.ends_with(".rs") || !name.contains('.'));
            let is_named =
                [' ', '/', '`'].iter().any(|before| list.contains(&format!("{before}{name}`")));
            assert!(!is_test || is_named, "docs/tests.md does not name {}/{name}", dir.display());
        }
    }
}

#[test]
fn unsafe_code_stays_at_its_addresses() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut stack = vec![root.join("src"), root.join("crates"), root.join("tests")];
    let mut found = BTreeSet::new();
    while let Some(path) = stack.pop() {
        if path.is_dir() {
            stack.extend(std::fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path()));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = std::fs::read_to_string(&path).unwrap();
            let uses = ["unsafe {", "unsafe fn", "unsafe impl", "unsafe extern"];
            let code = text.lines().filter(|line| !line.trim_start().starts_with("//"));
            let within = path.strip_prefix(root).unwrap();
            if !within.ends_with("tests/arrows.rs")
                && code.into_iter().any(|line| uses.iter().any(|word| line.contains(word)))
            {
                found.insert(within.to_string_lossy().into_owned());
            }
        }
    }
    for file in &found {
        assert!(UNSAFE.iter().any(|at| file.starts_with(at)), "unsafe code in {file}");
    }
    assert!(found.contains("crates/device/src/uring.rs"), "the search finds what is there");
}
