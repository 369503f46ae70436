//! Mounts and mount namespaces: each namespace has a manager of its own.

use std::path::Path;
use std::process::{Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};

use crate::common::volume::run_e2fsck;
use crate::common::{
    Draconis, USER_CAN_MOUNT, has_fuse, has_root, has_tool, mke2fs, mounts_below, report_skipped,
    wait_until,
};

fn has_namespaces(test: &str) -> bool {
    has_root(test) && has_fuse(test) && has_tool(test, "unshare")
}

fn make_volume(draconis: &Draconis, name: &str) -> std::path::PathBuf {
    let tree = draconis.make_dir("tree");
    std::fs::write(tree.join("hello"), format!("hello {name}\n")).unwrap();
    let image = draconis.path(name);
    mke2fs(&image, Some(&tree), &["-t", "ext2"], "8M");
    image
}

/// Returns the sockets of managers.
fn managers(draconis: &Draconis) -> usize {
    let names = std::fs::read_dir(draconis.path("run")).unwrap();
    let names = names.map(|name| name.unwrap().file_name().into_string().unwrap());
    names.filter(|name| name.starts_with("manager-") && name.ends_with(".sock")).count()
}

#[test]
fn mount_is_in_the_namespace_of_its_caller() {
    if !has_namespaces("mounting in another namespace") {
        return;
    }
    let draconis = Draconis::new();
    let [a, b] = ["a.img", "b.img"].map(|name| make_volume(&draconis, name));
    let (out, within) = (draconis.mount(&b, "out", "ro"), draconis.make_dir("in"));
    let shell = draconis.spawn_in_mount_namespace(
        r#"
        "$DRACONIS" mount a.img in
        cat in/hello out/hello
        "$DRACONIS" status --json > status
        echo > mounted
        while [ ! -e go ]; do sleep 0.01; done
        "$DRACONIS" umount in
        # The copy of a mount of another namespace, and no more.
        "$DRACONIS" umount out
        ls in out
        "#,
    );
    wait_until("it is mounted", || draconis.path("mounted").exists());
    assert_eq!(std::fs::read_dir(&within).unwrap().count(), 0);
    let status = draconis.status();
    let points = |status: &serde_json::Value, list: &str| -> Vec<String> {
        let mounts = status[list].as_array().unwrap().iter();
        mounts.map(|mount| mount["mount_point"].as_str().unwrap().to_owned()).collect()
    };
    let [out_name, in_name] = [&out, &within].map(|at| vec![at.to_str().unwrap().to_owned()]);
    assert_eq!(points(&status, "mounts"), out_name);
    assert_eq!(points(&status, "other_namespaces"), in_name);
    let printed = draconis.run_ok(["status"]);
    assert!(printed.contains("  namespace another one, of process "), "{printed}");
    let status = std::fs::read_to_string(draconis.path("status")).unwrap();
    let status: serde_json::Value = serde_json::from_str(&status).unwrap();
    assert_eq!(points(&status, "mounts"), in_name);
    assert_eq!(points(&status, "other_namespaces"), out_name);
    // Nothing is mounted there for this namespace, and the volume is in use.
    let output = draconis.run_failing(["umount".as_ref(), within.as_os_str()]);
    assert!(output.contains("nothing is mounted there"), "{output}");
    let other = draconis.make_dir("other");
    let output = draconis.run_failing(["mount".as_ref(), a.as_os_str(), other.as_os_str()]);
    assert!(output.contains("in use"), "{output}");
    assert_eq!(managers(&draconis), 2);
    std::fs::write(draconis.path("go"), "").unwrap();
    let ended = shell.wait_with_output().unwrap();
    assert!(ended.status.success(), "{ended:?}");
    let output = String::from_utf8(ended.stdout).unwrap();
    assert_eq!(output, "hello a.img\nhello b.img\nin:\n\nout:\n");
    run_e2fsck(&a);
    assert_eq!(std::fs::read_to_string(out.join("hello")).unwrap(), "hello b.img\n");
    wait_until("the manager of the namespace ends", || managers(&draconis) == 1);
    draconis.run_ok(["umount".as_ref(), out.as_os_str()]);
    assert!(mounts_below(Path::new(draconis.dir.path())).is_empty());
    wait_until("the manager ends", || managers(&draconis) == 0);
}

/// Mounts as user 1000 that is root of a user namespace.
const USER_NAMESPACE_SCRIPT: &str = r#"
    cat > inner <<'END'
        "$DRACONIS" mount a.img at
        cat at/hello
        echo new > at/new
        "$DRACONIS" status --json > at/status
        cat at/status
        "$DRACONIS" umount at
        ls at
END
    as_user unshare -Urm sh -eu inner
"#;

#[test]
fn root_of_a_user_namespace_mounts() {
    let test = "mounting in a user namespace";
    if !has_namespaces(test) || !has_tool(test, "setpriv") {
        return;
    }
    let works = "setpriv --reuid 1000 --regid 1000 --clear-groups unshare -Urm true 2>/dev/null";
    if !std::process::Command::new("sh").args(["-c", works]).status().unwrap().success() {
        report_skipped("users may make no user namespaces here");
        return;
    }
    let draconis = Draconis::new();
    let image = make_volume(&draconis, "a.img");
    draconis.make_dir("at");
    // Where another user may run it.
    crate::common::copy_draconis(&draconis.path("draconis"));
    let script =
        format!("export DRACONIS=\"$PWD/draconis\"\n{USER_CAN_MOUNT}{USER_NAMESPACE_SCRIPT}");
    let ended = draconis.spawn_in_mount_namespace(&script).wait_with_output().unwrap();
    let output = String::from_utf8(ended.stdout).unwrap();
    assert!(ended.status.success(), "{output}");
    let status = output.strip_prefix("hello a.img\n").unwrap();
    let status: serde_json::Value = serde_json::from_str(status).unwrap();
    let sandbox = &status["mounts"][0]["sandbox"];
    assert!(sandbox["no_capabilities"] == true && sandbox["seccomp"] == true, "{sandbox}");
    run_e2fsck(&image);
    assert_eq!(draconis.run_ok(["cat", &format!("{}:/new", image.display())]), "new\n");
}

#[test]
fn unmount_leaves_copies_and_names_them() {
    if !has_namespaces("unmounting beside copies") {
        return;
    }
    let draconis = Draconis::new();
    let [image, other] = ["a.img", "b.img"].map(|name| {
        let image = draconis.path(name);
        mke2fs(&image, None, &["-t", "ext4"], "16M");
        image
    });
    let at = draconis.mount(&image, "at", "rw,commit=1000");
    let unmount = |at: &Path| {
        let ended = draconis.run(["umount".as_ref(), at.as_os_str()]);
        let output = String::from_utf8(ended.stderr).unwrap();
        assert!(ended.status.success(), "{output}");
        output
    };
    let holding = draconis.spawn_in_mount_namespace(
        "while [ ! -e go ]; do sleep 0.01; done
         echo more >at/more",
    );
    std::fs::write(at.join("new"), "x").unwrap();
    let output = unmount(&at);
    let holder = format!("goes on in the mount namespace of process {} (sh)", holding.id());
    assert!(output.contains(&holder) && output.lines().count() == 1, "{output}");
    assert!(mounts_below(&at).is_empty());
    // What was written is durable.
    let copy = draconis.path("copy.img");
    std::fs::copy(&image, &copy).unwrap();
    assert_eq!(draconis.run_ok(["cat", &format!("{}:/new", copy.display())]), "x");
    let printed = draconis.run_ok(["status"]);
    assert!(printed.contains("  copies    unmounted here, goes on in the mount"), "{printed}");
    // The directory is free, the volume is not.
    let output = draconis.run_failing(["mount".as_ref(), image.as_os_str(), at.as_os_str()]);
    assert!(output.contains("already mounted"), "{output}");
    draconis.mount(&other, "at", "ro");
    let bound = draconis.make_dir("bound");
    let bind = std::process::Command::new("mount").arg("--bind").args([&at, &bound]).status();
    assert!(bind.unwrap().success());
    let output = unmount(&at);
    assert!(output.contains(&format!("goes on in a mount on {}", bound.display())), "{output}");
    assert_eq!(unmount(&bound), "");
    // A mount ends with its last copy.
    std::fs::write(draconis.path("go"), "").unwrap();
    assert!(holding.wait_with_output().unwrap().status.success());
    wait_until("no mount is left", || draconis.status()["mounts"] == serde_json::json!([]));
    run_e2fsck(&image);
    assert_eq!(draconis.run_ok(["cat", &format!("{}:/more", image.display())]), "more\n");
    let at = draconis.mount(&image, "at", "rw");
    std::fs::write(at.join("newer"), "x").unwrap();
    assert_eq!(unmount(&at), "");
    run_e2fsck(&image);
}

#[test]
fn foreground_mount_names_copies_at_ctrl_c() {
    if !has_namespaces("a foreground mount with copies") {
        return;
    }
    let draconis = Draconis::new();
    let image = make_volume(&draconis, "a.img");
    let (at, bound) = (draconis.make_dir("at"), draconis.make_dir("bound"));
    let mut command = draconis.command();
    command.args(["mount", "-f"]).args([&image, &at]).stderr(Stdio::piped());
    let mounted = command.spawn().unwrap();
    wait_until("it is served", || draconis.status()["mounts"][0]["state"] == "serving");
    let bind = Command::new("mount").arg("--bind").args([&at, &bound]).status();
    assert!(bind.unwrap().success());
    let holding = draconis.spawn_in_mount_namespace("while [ ! -e go ]; do sleep 0.01; done");
    let pid = Pid::from_raw(mounted.id() as i32).unwrap();
    kill_process(pid, Signal::INT).unwrap();
    let ended = mounted.wait_with_output().unwrap();
    let output = String::from_utf8(ended.stderr).unwrap();
    assert!(ended.status.success(), "{output}");
    for holder in [
        format!("a mount on {}", bound.display()),
        format!("the mount namespace of process {} (sh)", holding.id()),
    ] {
        assert!(output.contains("goes on in ") && output.contains(&holder), "{output}");
    }
    assert!(mounts_below(&at).is_empty());
    draconis.run_ok(["umount".as_ref(), bound.as_os_str()]);
    std::fs::write(draconis.path("go"), "").unwrap();
    assert!(holding.wait_with_output().unwrap().status.success());
    wait_until("no mount is left", || draconis.status()["mounts"] == serde_json::json!([]));
    run_e2fsck(&image);
}

#[test]
fn upgrade_names_mounts_of_other_namespaces() {
    if !has_namespaces("upgrading beside another namespace") {
        return;
    }
    let draconis = Draconis::new();
    make_volume(&draconis, "a.img");
    let here = make_volume(&draconis, "b.img");
    let (out, within) = (draconis.mount(&here, "out", "ro"), draconis.make_dir("in"));
    let shell = draconis.spawn_in_mount_namespace(
        r#"
        "$DRACONIS" mount a.img in
        echo > mounted
        while [ ! -e go ]; do sleep 0.01; done
        "$DRACONIS" umount in
        "#,
    );
    wait_until("it is mounted", || draconis.path("mounted").exists());
    let keeper = draconis.status()["other_namespaces"][0]["keeper_pid"].clone();
    let upgraded = draconis.run(["upgrade"]);
    let output = String::from_utf8(upgraded.stdout).unwrap();
    let errors = String::from_utf8(upgraded.stderr).unwrap();
    assert!(!upgraded.status.success(), "{output}{errors}");
    assert!(output.starts_with(&format!("{} goes on with", out.display())), "{output}{errors}");
    let named = format!(
        "{}: not upgraded, since it is in another mount namespace: nsenter -t {keeper} -m",
        within.display()
    );
    assert!(errors.contains(&named) && errors.lines().count() == 1, "{errors}");
    std::fs::write(draconis.path("go"), "").unwrap();
    assert!(shell.wait_with_output().unwrap().status.success());
    let upgraded = draconis.run_ok(["upgrade"]);
    assert!(upgraded.contains("goes on with"), "{upgraded}");
    draconis.run_ok(["umount".as_ref(), out.as_os_str()]);
}
