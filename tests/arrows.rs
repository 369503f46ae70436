//! Dependencies between crates and between the files of a crate, unsafe code, licences, and the
//! lists of these in ARCHITECTURE.md.

#[path = "arrows/imports.rs"]
mod imports;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Permitted dependencies of each crate on our other crates.
const ALLOWED_CRATE_DEPENDENCIES: &[(&str, &[&str])] = &[
    ("types", &[]),
    ("exchange", &["types"]),
    ("device", &["exchange", "types"]),
    ("container", &["device", "types"]),
    ("ext-format", &["types"]),
    ("ext-volume", &["device", "ext-format", "types"]),
    ("ext-offline", &["device", "ext-format", "ext-volume", "types"]),
    ("ext", &["device", "ext-format", "ext-offline", "ext-volume", "types"]),
    ("objects", &["device", "types"]),
    ("bucket", &["device", "types"]),
    ("nbd", &["device", "types"]),
    ("vhost-user", &["device", "types"]),
    ("service", &["container", "device", "exchange", "ext", "objects", "types"]),
    ("front", &["exchange", "types"]),
    ("access", &["container", "device", "ext", "objects", "service", "types"]),
    ("object-store", &["access", "bucket", "device", "objects", "types"]),
    ("sqlite", &["access", "bucket", "device", "objects", "types"]),
    ("capi", &["access", "ext", "objects", "types"]),
    ("testkit", &["device", "objects", "types"]),
    ("lab", &["device", "exchange", "ext", "front", "objects", "service", "testkit", "types"]),
    // Other stores, for the lab, which runs this as a separate program.
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
            "nbd",
            "objects",
            "service",
            "types",
            "vhost-user",
        ],
    ),
];

/// Permitted licences of dependencies.
const ALLOWED_LICENCES: &[&str] = &[
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

fn cargo_metadata() -> serde_json::Value {
    // Packages for other platforms are not downloaded.
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

/// Strips the prefix `draconis-`; `draconis` itself is the empty name.
fn strip_crate_prefix(name: &str) -> Option<&str> {
    if name == "draconis" { Some("") } else { name.strip_prefix("draconis-") }
}

#[test]
fn crate_dependencies_are_allowed() {
    let metadata = cargo_metadata();
    let mut wrong = vec![];
    for package in metadata["packages"].as_array().unwrap() {
        let Some(name) = strip_crate_prefix(package["name"].as_str().unwrap()) else { continue };
        let Some((_, may)) =
            ALLOWED_CRATE_DEPENDENCIES.iter().find(|(crate_name, _)| *crate_name == name)
        else {
            wrong.push(format!("{name} is not in the table of arrows"));
            continue;
        };
        for dependency in package["dependencies"].as_array().unwrap() {
            let used = dependency["name"].as_str().unwrap();
            // Test dependencies do not count.
            if !dependency["kind"].is_null() {
                continue;
            }
            if let Some(used) = strip_crate_prefix(used)
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
    let metadata = cargo_metadata();
    for package in metadata["packages"].as_array().unwrap() {
        let name = &package["name"];
        let licence =
            package["license"].as_str().unwrap_or_else(|| panic!("{name} has no licence"));
        // In an SPDX expression, one alternative or all parts must be permitted.
        let allowed = licence.split(" OR ").flat_map(|part| part.split('/')).any(|alternative| {
            let names = alternative.split([' ', '(', ')']).filter(|word| !word.is_empty());
            let names: BTreeSet<&str> =
                names.filter(|word| !["AND", "WITH"].contains(word)).collect();
            names.iter().all(|name| ALLOWED_LICENCES.contains(name))
        });
        assert!(allowed, "{name}: {licence}");
    }
}

/// Published crates.
const PUBLISHED_CRATES: &[&str] =
    &["types", "exchange", "device", "ext-format", "ext-volume", "ext-offline", "ext", "objects"];

#[test]
fn published_crates_have_metadata_and_published_dependencies() {
    for package in cargo_metadata()["packages"].as_array().unwrap() {
        let Some(name) = strip_crate_prefix(package["name"].as_str().unwrap()) else { continue };
        let is_published = package["publish"].is_null();
        assert_eq!(is_published, PUBLISHED_CRATES.contains(&name), "{name}: publish");
        if !is_published {
            continue;
        }
        for field in ["description", "license", "readme", "rust_version"] {
            assert!(package[field].is_string(), "{name} has no {field}");
        }
        assert!(!package["keywords"].as_array().unwrap().is_empty(), "{name} has no keywords");
        for dependency in package["dependencies"].as_array().unwrap() {
            let Some(used) = strip_crate_prefix(dependency["name"].as_str().unwrap()) else {
                continue;
            };
            // Test dependencies are not published.
            if dependency["kind"].is_null() {
                assert!(
                    PUBLISHED_CRATES.contains(&used),
                    "{name} needs {used}, which is not published"
                );
                assert_ne!(dependency["req"], "*", "{name} takes any version of {used}");
            }
        }
    }
}

/// Files are overwritten only after they were compared with the sources of the command.
#[test]
fn only_destination_module_overwrites_host_files() {
    const ALLOWED_FILE: &str = "crates/access/src/destination.rs";
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
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
        // The read-ahead setting of a mount is a sysfs file.
        let writes = writes - code.matches("std::fs::write(&file, READ_AHEAD_KIB").count();
        if writes > 0 || opens.iter().any(|word| code.contains(word)) {
            found.insert(path.strip_prefix(root).unwrap().to_string_lossy().into_owned());
        }
    }
    assert_eq!(found, BTreeSet::from([ALLOWED_FILE.to_owned()]));
}

/// Where unsafe code is permitted; ARCHITECTURE.md lists all but the tests.
const FILES_WITH_UNSAFE: &[&str] = &[
    "crates/exchange/",
    "crates/device/src/process.rs",
    "crates/device/src/uring.rs",
    "crates/front/src/fuse/ring.rs",
    "crates/service/src/sandbox.rs",
    "crates/service/src/connection.rs",
    "crates/service/src/oplog.rs",
    "crates/service/src/loop_device.rs",
    "crates/capi/src/raw.rs",
    "crates/sqlite/src/raw.rs",
    "crates/sqlite/tests/common/mod.rs",
    "crates/testkit/src/fork.rs",
    "lab/peers/src/cxx.rs",
    "lab/peers/src/lmdb.rs",
    "lab/peers/src/mapping.rs",
    // Attacks the sandbox.
    "crates/service/tests/sandbox.rs",
    // Makes system calls without a wrapper library.
    "tests/mounts/exact/sys.rs",
    // Shares memory between both sides of a session.
    "tests/common/route.rs",
    "crates/ext/tests/matrix/ioctl.rs",
];

fn read(path: &str) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    std::fs::read_to_string(root.join(path)).unwrap()
}

/// Folders of all packages but the root.
fn package_folders(root: &Path) -> Vec<PathBuf> {
    let crates = std::fs::read_dir(root.join("crates")).unwrap();
    let crates = crates.map(|entry| entry.unwrap().path());
    crates.chain([root.join("lab"), root.join("lab/peers")]).collect()
}

#[test]
fn architecture_document_lists_dependencies_and_unsafe_files() {
    let page = read("ARCHITECTURE.md");
    for (name, may) in ALLOWED_CRATE_DEPENDENCIES {
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
    for address in FILES_WITH_UNSAFE.iter().filter(|address| !address.contains("tests/")) {
        assert!(list.contains(&format!("`{address}`")), "unsafe code in {address}");
    }
}

#[test]
fn tests_document_lists_every_test_file() {
    let (root, list) = (Path::new(env!("CARGO_MANIFEST_DIR")), read("docs/tests.md"));
    let dirs = package_folders(root).into_iter().map(|folder| folder.join("tests"));
    let areas = ["commands", "disks", "mounts", "stores"].map(|area| root.join("tests").join(area));
    for dir in dirs.chain(areas).chain([root.join("tests")]).filter(|dir| dir.is_dir()) {
        for entry in std::fs::read_dir(&dir).unwrap() {
            let entry = entry.unwrap();
            let name = entry.file_name().into_string().unwrap();
            let is_test = name.ends_with(".rs") || entry.path().join("mod.rs").exists();
            let is_helper = ["main.rs", "common", "driver"].contains(&name.as_str());
            let is_named =
                [' ', '/', '`'].iter().any(|before| list.contains(&format!("{before}{name}`")));
            assert!(
                !is_test || is_helper || is_named,
                "docs/tests.md does not name {}/{name}",
                dir.display()
            );
        }
    }
}

#[test]
fn unsafe_code_is_only_in_listed_files() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut stack = ["src", "crates", "lab", "tests"].map(|folder| root.join(folder)).to_vec();
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
        assert!(FILES_WITH_UNSAFE.iter().any(|at| file.starts_with(at)), "unsafe code in {file}");
    }
    assert!(found.contains("crates/device/src/uring.rs"), "the search finds what is there");
}

/// Source folders of the program, whose messages name paths of the host.
const FOLDERS_WITH_MESSAGES: &[&str] = &[
    "src",
    "crates/access/src",
    "crates/bucket/src",
    "crates/capi/src",
    "crates/front/src",
    "crates/service/src",
];

/// `Path::display` shows two names that are not UTF-8 alike; `ShowPath::shown` does not.
#[test]
fn messages_show_every_byte_of_a_path() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut stack: Vec<_> = FOLDERS_WITH_MESSAGES.iter().map(|folder| root.join(folder)).collect();
    let mut uses = 0;
    while let Some(path) = stack.pop() {
        if path.is_dir() {
            stack.extend(std::fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path()));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = std::fs::read_to_string(&path).unwrap();
            let code = text.split("#[cfg(test)]\nmod tests").next().unwrap_or_default();
            assert!(!code.contains(".display()"), "{}: use `.shown()`", path.display());
            uses += code.matches(".shown()").count();
        }
    }
    assert!(uses > 200, "{uses}");
}

/// Known import cycles: a crate, and the number of files in each cycle. None may be added.
const KNOWN_IMPORT_CYCLES: &[(&str, &[usize])] = &[];

#[test]
fn import_cycles_are_known() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    for folder in package_folders(root).into_iter().chain([root.to_owned()]) {
        let name = folder.strip_prefix(root).unwrap().file_name().unwrap_or_default();
        let name = name.to_str().unwrap();
        let known = KNOWN_IMPORT_CYCLES
            .iter()
            .find(|(known, _)| *known == name)
            .map_or(&[][..], |known| known.1);
        let cycles = imports::ImportGraph::read(&folder.join("src")).import_cycles();
        let mut lens: Vec<_> = cycles.iter().map(|(files, _)| files.len()).collect();
        lens.sort_unstable();
        let shown: Vec<_> = cycles
            .iter()
            .map(|(files, uses)| format!("{files:?}\n  {}", uses.join("\n  ")))
            .collect();
        assert_eq!(lens, known, "cycles of imports in {name:?}:\n{}", shown.join("\n"));
    }
}

/// Crates whose `lib.rs` has a table of layers: a module imports only modules named before it.
const LAYERED_CRATES: &[&str] = &["objects"];

#[test]
fn modules_import_only_lower_layers() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("crates");
    for name in LAYERED_CRATES {
        let page = read(&format!("crates/{name}/src/lib.rs"));
        let rows =
            page.lines().filter_map(|line| line.strip_prefix("//! | `")?.split("` |").next());
        let layers: Vec<_> = rows.flat_map(|row| row.split("`, `")).collect();
        let layer_of = |module: &imports::Module| {
            let found = layers.iter().position(|layer| *layer == module[0]);
            found.unwrap_or_else(|| panic!("the layers of {name} do not name {}", module[0]))
        };
        let imports = imports::ImportGraph::read(&root.join(name).join("src"));
        for (from, uses) in imports.import_edges() {
            for (to, path) in uses.into_iter().filter(|(to, _)| to[0] != from[0]) {
                let is_lower = layer_of(to) < layer_of(from);
                assert!(is_lower, "{name}: {} is not above {path}", from.join("/"));
            }
        }
    }
}

#[test]
fn architecture_document_names_existing_files() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let page = read("ARCHITECTURE.md");
    let names = page.split('`').skip(1).step_by(2);
    let paths =
        names.filter(|name| ["crates/", "src/", "tests/"].iter().any(|at| name.starts_with(at)));
    let mut count = 0;
    for path in paths {
        assert!(root.join(path).exists(), "ARCHITECTURE.md names {path}");
        count += 1;
    }
    assert!(count > 40, "{count} paths were found");
}
