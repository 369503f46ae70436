//! The header is what cbindgen makes of the sources, and a program in C that uses all of it works:
//! strictly compiled, by itself and under valgrind.

use std::path::{Path, PathBuf};
use std::process::Command;

use draconis_testkit::judge::{self, run_tool};
use draconis_testkit::report_skipped;

/// A program that can be started.
fn is_installed(program: &str) -> bool {
    Command::new(program).arg("--version").output().is_ok_and(|output| output.status.success())
}

/// Runs a command that must end well; what it writes.
fn run_and_capture(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    let written = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{command:?}: {}\n{written}{errors}", output.status);
    written.into_owned()
}

/// Where the shared library lies that was built with this test.
fn library_path() -> PathBuf {
    let deps = std::env::current_exe().unwrap().parent().unwrap().to_owned();
    let all = [deps.clone(), deps.parent().unwrap().to_owned()];
    let found = all.iter().find(|dir| dir.join("libdraconis.so").exists());
    found.expect("libdraconis.so is built with the tests").clone()
}

fn source_path(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

#[test]
#[ignore = "tools: cbindgen"]
fn header_matches_generated_header() {
    let made = Command::new(source_path("../../tools/header")).output().unwrap();
    if made.status.code() == Some(127) {
        report_skipped("the comparison of draconis.h needs cbindgen");
        return;
    }
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let made = String::from_utf8(made.stdout).unwrap();
    let kept = std::fs::read_to_string(source_path("include/draconis.h")).unwrap();
    assert!(made == kept, "draconis.h is not what the sources say: make header writes it");
}

/// Makes three disk images over each other, with a volume.
fn make_backing_chain(dir: &Path) {
    let raw = dir.join("chain.img");
    run_and_capture(Command::new("mke2fs").args(["-q", "-t", "ext4"]).arg(&raw).arg("8M"));
    let make = |words: &[&str], image: &str| {
        run_and_capture(Command::new("qemu-img").current_dir(dir).args(words).arg(image));
    };
    make(&["convert", "-f", "raw", "-O", "qcow2", "chain.img"], "base.qcow2");
    for (behind, image) in [("base.qcow2", "middle.qcow2"), ("middle.qcow2", "top.qcow2")] {
        make(&["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", behind], image);
    }
}

/// What other programs find in images that the program in C has made or changed.
fn assert_clean_by_e2fsck(dir: &Path) {
    let images = ["qcow2", "vhdx", "top.qcow2"];
    for (image, format) in images.into_iter().zip(["qcow2", "vhdx", "qcow2"]) {
        if !dir.join(image).exists() || !is_installed("qemu-img") {
            continue;
        }
        let mut check = Command::new("qemu-img");
        run_and_capture(check.current_dir(dir).args(["check", "-q", "-f", format, image]));
        let mut convert = Command::new("qemu-img");
        run_and_capture(
            convert.current_dir(dir).args(["convert", "-f", format, "-O", "raw", image, "raw"]),
        );
        judge::assert_fsck_clean(dir.join("raw"));
    }
}

#[test]
fn c_program_uses_whole_api() {
    run_c_program(false);
}

/// The program uses images over each other, and valgrind watches it.
#[test]
#[ignore = "tools: qemu-img, valgrind"]
fn c_program_uses_images_over_each_other() {
    for program in ["qemu-img", "valgrind"] {
        if !is_installed(program) {
            return report_skipped(format_args!("a program in C over images needs {program}"));
        }
    }
    run_c_program(true);
}

fn run_c_program(with_tools: bool) {
    if !is_installed("cc") {
        report_skipped("a program in C needs cc");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let libraries = library_path();
    let compiled = |name: &str, more: &[&str]| {
        let program = dir.path().join(name);
        run_and_capture(
            Command::new("cc")
                .args(["-std=c11", "-D_GNU_SOURCE", "-g", "-O1", "-Wall", "-Wextra", "-Werror"])
                .args(["-pedantic", "-Wconversion", "-Wstrict-prototypes"])
                .args(more)
                .arg("-I")
                .arg(source_path("include"))
                .arg(source_path("tests/all.c"))
                .arg("-L")
                .arg(&libraries)
                .args(["-ldraconis", "-o"])
                .arg(&program),
        );
        program
    };
    let program = compiled("all", &[]);
    // The loader asks for the name that the library has.
    std::os::unix::fs::symlink(
        libraries.join("libdraconis.so"),
        dir.path().join("libdraconis.so.0"),
    )
    .unwrap();
    let fresh = |name: &str| {
        let work = dir.path().join(name);
        std::fs::create_dir(&work).unwrap();
        if with_tools {
            make_backing_chain(&work);
        }
        work
    };
    let work = fresh("work");
    let error_text =
        run_and_capture(Command::new(&program).arg(&work).env("LD_LIBRARY_PATH", dir.path()));
    assert_eq!(error_text, "all of it works\n");
    assert_clean_by_e2fsck(&work);
    for image in ["c.img", "filled.img"] {
        run_tool("e2fsck", &["-fn", work.join(image).to_str().unwrap()]);
    }
    // All memory is the sanitizer's then, the library's too: what is lost is found.
    let sanitized = compiled("sanitized", &["-fsanitize=address,undefined"]);
    let printed = run_and_capture(
        Command::new(sanitized).arg(fresh("kept")).env("LD_LIBRARY_PATH", dir.path()),
    );
    assert_eq!(printed, "all of it works\n");
    if !with_tools {
        return;
    }
    // It lets no other thread run while one waits for a ring of the kernel, as those of stores do.
    let printed = run_and_capture(
        Command::new("valgrind")
            .args(["--quiet", "--error-exitcode=9", "--leak-check=full"])
            .args(["--show-leak-kinds=definite", "--errors-for-leak-kinds=definite"])
            .arg(&program)
            .arg(fresh("watched"))
            .arg("volumes")
            .env("LD_LIBRARY_PATH", dir.path()),
    );
    assert_eq!(printed, "all of it works\n");
}

#[test]
fn header_compiles_as_cxx() {
    if !is_installed("c++") {
        report_skipped("a program in C++ needs c++");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("use.cc");
    std::fs::write(
        &program,
        "#include \"draconis.h\"\nint main() { return !draconis_version(); }\n",
    )
    .unwrap();
    run_and_capture(
        Command::new("c++")
            .args(["-std=c++17", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", "-I"])
            .arg(source_path("include"))
            .arg(&program),
    );
}
