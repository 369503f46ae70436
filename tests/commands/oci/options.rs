//! Options for images and for the resulting volume.

use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::process::{Command, Stdio};

use crate::common::{Draconis, copy_draconis, has_root, has_tool};
use crate::oci::build::{OciLayout, compress, create_tar, run_and_capture};
use crate::oci::volume_tree_properties;
use draconis_testkit::judge::assert_fsck_clean;

/// Returns a layer with one file.
fn make_layer(draconis: &Draconis, name: &str) -> Vec<u8> {
    let dir = draconis.make_dir(&format!("layer of {name}"));
    std::fs::write(dir.join(name), name).unwrap();
    let path = draconis.path("layer.tar");
    create_tar(&dir, &path, &[]);
    std::fs::read(path).unwrap()
}

fn list_volume_names(draconis: &Draconis, image: &str) -> String {
    draconis.run_ok(["ls", image]).replace("lost+found\n", "").replace('\n', " ")
}

#[test]
fn tag_and_platform_select_image() {
    let draconis = Draconis::new();
    let mut layout = OciLayout::new(draconis.path("oci"));
    layout.add_image("docker.io/library/one:1", &[make_layer(&draconis, "one")]);
    let manifests: Vec<String> = [("amd64", ""), ("arm64", ""), ("arm", r#","variant":"v7""#)]
        .iter()
        .map(|(architecture, variant)| {
            let platform = format!("linux/{architecture}");
            let manifest = layout.add_manifest(&platform, &[make_layer(&draconis, architecture)]);
            format!(
                r#"{manifest},"platform":{{"os":"linux","architecture":"{architecture}"{variant}}}}}"#
            )
        })
        .collect();
    let proof = layout.add_blob("manifest.v1+json", b"{}");
    let proof = format!(r#"{proof},"platform":{{"os":"unknown","architecture":"unknown"}}}}"#);
    let index = format!(r#"{{"schemaVersion":2,"manifests":[{},{proof}]}}"#, manifests.join(","));
    // An index of an index.
    let inner = layout.add_blob("index.v1+json", index.as_bytes());
    let outer = format!(r#"{{"schemaVersion":2,"manifests":[{inner}}}]}}"#);
    let outer = layout.add_blob("index.v1+json", outer.as_bytes());
    layout.add_to_index(&outer, "many");

    let image = draconis.path("image").display().to_string();
    let config = draconis.path("config").display().to_string();
    let make = |origin: &str, platform: Option<&str>| {
        let mut command = vec!["format", "--force", "--from", origin, "--config", &config];
        command.extend(platform.iter().flat_map(|platform| ["--platform", platform]));
        command.push(&image);
        draconis.run(&command)
    };
    let made = |origin: &str, platform: Option<&str>| {
        let output = make(origin, platform);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        list_volume_names(&draconis, &image)
    };
    assert_eq!(made(&layout.source_spec("docker.io/library/one:1"), None), "one ");
    let many = layout.source_spec("many");
    for platform in ["linux/amd64", "linux/arm64"] {
        let name = platform.rsplit('/').next().unwrap();
        assert_eq!(made(&many, Some(platform)), format!("{name} "));
        assert_eq!(std::fs::read_to_string(&config).unwrap(), OciLayout::config_json(platform));
    }
    assert_eq!(made(&many, Some("linux/arm")), "arm ");
    let refused = |origin: &str, platform: Option<&str>| {
        let output = make(origin, platform);
        assert_eq!(output.status.code(), Some(1));
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let text = refused(&many, Some("linux/s390x"));
    assert!(text.contains("linux/amd64, linux/arm64, linux/arm/v7"), "{text}");
    let text = refused(&layout.source_spec(""), None);
    assert!(text.contains("several") && text.contains("docker.io/library/one:1, many"), "{text}");
    let text = refused(&layout.source_spec("no such"), None);
    assert!(text.contains("no image no such"), "{text}");
    let text = refused(&layout.source_spec("docker.io/library/one:1"), Some("linux/arm64"));
    assert!(text.contains("for linux/amd64"), "{text}");
    let tar = draconis.path("layer.tar").display().to_string();
    assert!(refused(&tar, None).contains("--config"));
}

#[test]
fn permissions_come_from_tar_headers() {
    if !has_root("capabilities and lists in images") || !has_tool("lists in images", "setfacl") {
        return;
    }
    let draconis = Draconis::new();
    let dir = draconis.make_dir("tree");
    std::fs::write(dir.join("file"), b"x").unwrap();
    run_and_capture(
        Command::new("setfacl").args(["-m", "u:54321:rw,g:54322:r"]).arg(dir.join("file")),
    );
    // A capability in the kernel's format: version 2, CAP_NET_RAW.
    let capability = [1, 0, 0, 2, 0, 0x20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    std::fs::write(dir.join("ping"), b"x").unwrap();
    let flags = rustix::fs::XattrFlags::empty();
    rustix::fs::setxattr(dir.join("ping"), "security.capability", &capability, flags).unwrap();
    std::fs::set_permissions(dir.join("ping"), PermissionsExt::from_mode(0o6755)).unwrap();
    let expected = crate::oci::merged_tree_properties(&dir);
    let path = draconis.path("layer.tar");
    // ACLs as text, as `tar --acls` writes them, and as bytes.
    for words in [true, false] {
        match words {
            true => drop(run_and_capture(
                Command::new("tar")
                    .args(["--format=pax", "--acls", "--xattrs", "--xattrs-include=security.*"])
                    .arg("-C")
                    .arg(&dir)
                    .arg("-cf")
                    .arg(&path)
                    .arg("."),
            )),
            false => create_tar(&dir, &path, &[]),
        }
        let mut layout = OciLayout::new(draconis.path("oci"));
        layout.add_image("", &[compress("gzip", &std::fs::read(&path).unwrap())]);
        let image = draconis.path("image");
        let from = layout.source_spec("");
        draconis.run_ok(["format", "--force", "--from", &from, image.to_str().unwrap()]);
        assert_fsck_clean(&image);
        crate::common::assert_same_trees(&volume_tree_properties(&draconis, &image), &expected);
    }
}

#[test]
fn owner_exclude_list_and_table_options() {
    let draconis = Draconis::new();
    let dir = draconis.make_dir("tree");
    std::fs::create_dir_all(dir.join("sub/deep")).unwrap();
    for name in ["a.c", "a.o", "sub/b.o", "sub/deep/c.c"] {
        std::fs::write(dir.join(name), name).unwrap();
    }
    let tar_path = draconis.path("tree.tar");
    create_tar(&dir, &tar_path, &[]);
    let (dir, tar_path) = (dir.to_str().unwrap(), tar_path.to_str().unwrap());
    let image = draconis.path("image").display().to_string();
    let tree = |arguments: &[&str]| {
        draconis.run_ok([&["format", "--force"], arguments, &[&image]].concat());
        assert_fsck_clean(&image);
        let listed = draconis.run_ok(["ls", "-l", "-R", &image]);
        let tree = draconis.run_ok(["tree", &image]);
        (listed, tree)
    };
    for from in [dir, tar_path] {
        let (_, shown) = tree(&["--from", from, "--exclude", "*.o", "--exclude", "sub/deep/"]);
        assert!(shown.contains("a.c") && shown.contains("sub"), "{shown}");
        assert!(!shown.contains(".o") && !shown.contains("deep"), "{shown}");
        let (listed, _) = tree(&["--from", from, "--owner", "12:34"]);
        assert!(listed.contains(" 12 ") && !listed.contains(" 0 0 "), "{listed}");
        let (listed, _) = tree(&["--from", from, "--squash"]);
        assert!(listed.contains("rw-r"), "{listed}");
        assert!(listed.lines().all(|line| line.len() < 20 || line.contains("     0     0 ")));
        let (listed, _) = tree(&["--from", from, "--squash", "--squash-perms"]);
        assert!(listed.contains("rw-------") && !listed.contains("rw-r"), "{listed}");
    }
    let list = draconis.path("list");
    std::fs::write(&list, "a.c\n./sub/deep/c.c\nsub\n").unwrap();
    let (_, shown) = tree(&["--from", dir, "--list", list.to_str().unwrap()]);
    assert!(shown.contains("c.c") && !shown.contains(".o"), "{shown}");
    let mut command = draconis.command();
    command.args(["format", "--force", "--from", dir, "--list", "-", &image]);
    let mut child = command.stdin(Stdio::piped()).spawn().unwrap();
    std::io::Write::write_all(&mut child.stdin.take().unwrap(), b"sub/b.o\0").unwrap();
    assert!(child.wait().unwrap().success());
    let shown = draconis.run_ok(["tree", &image]);
    assert!(shown.contains("b.o") && !shown.contains("a.c"), "{shown}");
    for (list_text, said) in [("../x", "leads out"), ("/a.c", "begin in"), ("none", "none")] {
        std::fs::write(&list, list_text).unwrap();
        let list = list.to_str().unwrap();
        let told =
            draconis.run_failing(["format", "--force", "--from", dir, "--list", list, &image]);
        assert!(told.contains(said), "{told}");
    }
    let table = draconis.path("table");
    std::fs::write(&table, "/dev d 755 0 0\n/dev/tty c 666 0 5 4 0 0 1 3\n/a.c f 4755 1 2\n")
        .unwrap();
    let table = table.to_str().unwrap();
    let (listed, _) = tree(&["--from", tar_path, "-D", table]);
    assert!(listed.contains("tty2") && listed.contains("rwsr-xr-x"), "{listed}");
    draconis.run_ok(["format", "--force", "-D", "/dev/null", &image, "4M"]);
    let told = draconis.run_failing(["format", "--force", "-D", table, &image, "4M"]);
    assert!(told.contains("line 3"), "{told}");
}

#[test]
fn same_source_makes_identical_volume() {
    let draconis = Draconis::new();
    let dir = draconis.make_dir("tree");
    std::fs::create_dir(dir.join("sub")).unwrap();
    std::fs::write(dir.join("sub/file"), vec![7; 100_000]).unwrap();
    let path = draconis.path("tree.tar");
    create_tar(&dir, &path, &["--sort=name"]);
    let mut layout = OciLayout::new(draconis.path("oci"));
    layout.add_image("", &[compress("gzip", &std::fs::read(&path).unwrap())]);
    let origins = [dir.display().to_string(), path.display().to_string(), layout.source_spec("")];
    for origin in origins {
        let (one, two) = (draconis.path("one"), draconis.path("two"));
        for image in [&one, &two] {
            let image = image.to_str().unwrap();
            draconis.run_ok([
                "format",
                "-t",
                "ext4",
                "--force",
                "--reproducible",
                "--from",
                &origin,
                image,
            ]);
            // Reading must not change the result.
            std::fs::read(dir.join("sub/file")).unwrap();
            draconis_testkit::wait::pause(
                "the clock shows another second",
                std::time::Duration::from_millis(1100),
            );
        }
        assert_fsck_clean(&one);
        assert!(std::fs::read(&one).unwrap() == std::fs::read(&two).unwrap(), "{origin}");
    }
}

#[test]
fn free_space_option_is_honoured() {
    let draconis = Draconis::new();
    let dir = draconis.make_dir("tree");
    std::fs::write(dir.join("large"), vec![1; 10 << 20]).unwrap();
    let (dir, image) = (dir.to_str().unwrap(), draconis.path("image"));
    for (part, least) in [("0.5%", 0.005), ("25%", 0.25), ("85%", 0.85)] {
        let image = image.to_str().unwrap();
        draconis.run_ok(["format", "-t", "ext4", "--force", "--from", dir, "--free", part, image]);
        assert_fsck_clean(image);
        let info = draconis.run_ok(["info", "--json", image]);
        let info: serde_json::Value = serde_json::from_str(&info).unwrap();
        let number = |name: &str| info[name].as_f64().unwrap();
        let free = (number("free_blocks") - number("reserved_blocks")) / number("blocks");
        assert!(free >= least && free < least + 0.05, "{part}: {free}");
        std::fs::remove_file(image).unwrap();
    }
    let told =
        draconis.run_failing(["format", "--from", dir, "--free", "95%", image.to_str().unwrap()]);
    assert!(told.contains("-m"), "{told}");
    let told = draconis.run(["format", "--from", dir, "--free", "96%", image.to_str().unwrap()]);
    assert_eq!(told.status.code(), Some(2));
}

#[test]
fn unreadable_sources_are_refused_before_writing() {
    if !has_root("files that a user may not read") || !has_tool("another user", "setpriv") {
        return;
    }
    let draconis = Draconis::new();
    let dir = draconis.make_dir("tree");
    for name in ["one", "two", "open"] {
        std::fs::write(dir.join(name), name).unwrap();
    }
    std::fs::create_dir(dir.join("closed")).unwrap();
    for name in ["one", "two", "closed"] {
        std::fs::set_permissions(dir.join(name), PermissionsExt::from_mode(0o0)).unwrap();
    }
    std::fs::set_permissions(draconis.dir.path(), PermissionsExt::from_mode(0o777)).unwrap();
    let image = draconis.path("image");
    let as_nobody = |more: &[&str]| {
        // The program is in a directory that only root can read.
        let program = draconis.path("program");
        if !program.exists() {
            copy_draconis(&program);
        }
        let mut command = Command::new("setpriv");
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]).arg(program);
        command.args(["format", "--from"]).arg(&dir).args(more).arg(&image);
        command.output().unwrap()
    };
    let output = as_nobody(&[]);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{errors}");
    for name in ["one", "two", "closed"] {
        assert!(errors.contains(&format!("tree/{name}")), "{errors}");
    }
    assert!(errors.contains("--exclude") && !image.exists(), "{errors}");
    let output = as_nobody(&["--exclude", "[to][wn][oe]", "--exclude", "closed/"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(image.metadata().unwrap().uid(), 65534);
    assert_eq!(list_volume_names(&draconis, image.to_str().unwrap()), "open ");
}

#[test]
#[ignore = "long: half a minute: an image of a GiB"]
fn large_image_uses_little_memory() {
    let draconis = Draconis::new();
    let dir = draconis.make_dir("tree");
    let mut random = draconis_device::Random::new(5);
    let mut piece = vec![0; 1 << 20];
    random.fill(&mut piece);
    // In reverse, so that the archive has another order than the volume.
    for nth in (0..12).rev() {
        let bytes: Vec<u8> = (0..16u8).flat_map(|n| piece.iter().map(move |b| b ^ n)).collect();
        std::fs::write(dir.join(format!("file{nth}")), bytes).unwrap();
    }
    let path = draconis.path("tree.tar");
    create_tar(&dir, &path, &["--sort=none"]);
    let packed = compress("gzip", &std::fs::read(&path).unwrap());
    let mut layout = OciLayout::new(draconis.path("oci"));
    layout.add_image("", &[packed]);
    let image = draconis.path("image");
    let script = "ulimit -d 131072 && exec \"$0\" format --from \"$1\" \"$2\"";
    let output = Command::new("sh")
        .args(["-c", script, crate::common::program(), &layout.source_spec("")])
        .arg(&image)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_fsck_clean(&image);
    let sum = |bytes: &[u8]| crate::oci::build::sha256(bytes);
    for nth in [0, 11] {
        let target = format!("{}:/file{nth}", image.display());
        let output = draconis.run(["cat", &target]);
        let original = std::fs::read(dir.join(format!("file{nth}"))).unwrap();
        assert_eq!(sum(&output.stdout), sum(&original));
    }
}

#[test]
fn volume_and_image_round_trip() {
    let draconis = Draconis::new();
    let dir = draconis.make_dir("tree");
    crate::common::make_odd_tree(&dir);
    let (one, two) = (draconis.path("one.img"), draconis.path("two.img"));
    let (one, two) = (one.to_str().unwrap(), two.to_str().unwrap());
    draconis.run_ok(["format", "-t", "ext4", "--free", "1M", "--from", dir.to_str().unwrap(), one]);
    let out = draconis.path("image.tar");
    let config = draconis.path("config");
    let text = r#"{"os":"linux","architecture":"arm64","config":{"User":"me"},"history":[{}]}"#;
    std::fs::write(&config, text).unwrap();
    let (out, config) = (out.to_str().unwrap(), config.to_str().unwrap());
    draconis.run_ok(["tar", "--oci", out, "--config", config, "--tag", "made:1", one]);
    let first = std::fs::read(out).unwrap();
    draconis.run_ok(["tar", "--oci", out, "--config", config, "--tag", "made:1", one]);
    assert!(first == std::fs::read(out).unwrap());
    let from = format!("oci-archive:{out}:made:1");
    draconis.run_ok([
        "format",
        "-t",
        "ext4",
        "--from",
        &from,
        "--platform",
        "linux/arm64",
        "--config",
        config,
        two,
    ]);
    assert_fsck_clean(two);
    let found: serde_json::Value = serde_json::from_slice(&std::fs::read(config).unwrap()).unwrap();
    assert_eq!(found["config"]["User"], "me");
    assert!(found["history"].is_null() && found["rootfs"]["diff_ids"][0].is_string());
    let told = draconis.run_failing([
        "format",
        "--from",
        &from,
        "--platform",
        "linux/amd64",
        "--force",
        two,
    ]);
    assert!(told.contains("linux/arm64"), "{told}");
    if has_root("comparing an image with the volume it was made of") {
        let mut expected = volume_tree_properties(&draconis, one.as_ref());
        // Archives cannot contain sockets.
        expected.retain(|_, seen| seen.mode & 0o170_000 != 0o140_000);
        crate::common::assert_same_trees(
            &volume_tree_properties(&draconis, two.as_ref()),
            &expected,
        );
    }
    draconis.run_ok(["put", config, &format!("{one}:/.wh.name")]);
    assert!(draconis.run_failing(["tar", "--oci", out, one]).contains(".wh.name"));
}
