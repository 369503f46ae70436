//! Bash completions of command lines.

use std::path::Path;
use std::process::Command;

use crate::common::{Draconis, is_installed, report_skipped};

/// Lets bash complete a line in `dir` as readline does; returns the sorted
/// completions.
fn bash_completions(draconis: &Draconis, dir: &Path, line: &str) -> Vec<String> {
    let own = Path::new(crate::common::program()).parent().unwrap();
    let path = format!("{}:{}", own.display(), std::env::var("PATH").unwrap());
    // Splits the words as readline does, by COMP_WORDBREAKS, without quotes.
    let script = r#"
        source "$SCRIPT"
        COMP_LINE=$LINE COMP_POINT=${#LINE} COMP_WORDS=()
        word='' blank=''
        for ((at = 0; at < ${#LINE}; at++)); do
            letter=${LINE:at:1}
            if [[ $letter == '\' ]]; then
                word+=$letter${LINE:at+1:1}; at=$((at + 1)); blank=''
            elif [[ $letter == ' ' ]]; then
                [[ -n $word ]] && COMP_WORDS+=("$word"); word='' blank=1
            elif [[ $letter == [:=] ]]; then
                [[ -n $word ]] && COMP_WORDS+=("$word"); COMP_WORDS+=("$letter"); word='' blank=''
            else
                word+=$letter blank=''
            fi
        done
        [[ -n $word || -n $blank ]] && COMP_WORDS+=("$word")
        COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
        # Behind a colon or a sign of equality the word is empty.
        current=${COMP_WORDS[COMP_CWORD]}
        [[ $current == [:=] ]] && current=''
        before=''
        ((COMP_CWORD > 0)) && before=${COMP_WORDS[COMP_CWORD - 1]}
        complete -p draconis | grep -q _draconis_paths || exit 3
        _draconis_paths draconis "$current" "$before"
        [[ ${#COMPREPLY[@]} -eq 0 ]] || printf '%s\n' "${COMPREPLY[@]}"
    "#;
    let file = draconis.path("completions");
    std::fs::write(&file, draconis.run_ok(["completions", "bash"])).unwrap();
    let mut bash = Command::new("bash");
    bash.args(["--norc", "-c", script]).current_dir(dir);
    bash.env("PATH", path).env("SCRIPT", file).env("LINE", line);
    let output = bash.output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    // compopt complains outside of completion; the script silences it.
    assert!(output.status.success() && errors.is_empty(), "{line}: {errors}");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let mut offered: Vec<String> = text.lines().map(str::to_string).collect();
    offered.sort();
    offered
}

#[test]
fn bash_completes_options_files_and_image_paths() {
    if !is_installed("bash") {
        report_skipped("completion needs bash");
        return;
    }
    let draconis = Draconis::new();
    let dir = draconis.make_dir("work");
    let tree = draconis.make_dir("tree");
    for below in ["etc/ssl", "etc/systemd", "home", "a dir"] {
        std::fs::create_dir_all(tree.join(below)).unwrap();
    }
    for file in ["etc/hosts", "etc/.hidden", "a dir/x", "exe"] {
        std::fs::write(tree.join(file), file).unwrap();
    }
    std::os::unix::fs::symlink("etc", tree.join("link")).unwrap();
    let image = dir.join("disk.img");
    draconis.run_ok(["format", "--from", tree.to_str().unwrap(), image.to_str().unwrap()]);
    std::fs::copy(&image, dir.join("my disk.img")).unwrap();
    std::fs::create_dir(dir.join("directory")).unwrap();
    std::fs::write(dir.join("broken.img"), vec![7; 1 << 16]).unwrap();
    let offers = |line: &str| bash_completions(&draconis, &dir, line);

    assert!(offers("draconis unt").contains(&"untar".to_string()));
    assert!(!offers("draconis ").iter().any(|word| word == "complete-path" || word == "worker"));
    let options = offers("draconis ls -");
    assert!(options.contains(&"--json".to_string()) && options.contains(&"-R".to_string()));
    assert_eq!(offers("draconis tar --sparse "), ["always", "auto", "never"]);
    assert_eq!(offers("draconis store c"), ["check", "clone", "create"]);

    // Host files, also after options and other words.
    assert_eq!(offers("draconis ls d"), ["directory", "disk.img"]);
    assert_eq!(offers("draconis ls -l di"), ["directory", "disk.img"]);
    assert_eq!(offers("draconis put disk.img my"), ["my disk.img"]);
    assert_eq!(offers("draconis info --json dis"), ["disk.img"]);
    assert!(!offers("draconis cat ").iter().any(|word| word.starts_with('-')));

    // Paths in an image: bash replaces only the part behind the colon.
    assert_eq!(offers("draconis cat disk.img:/et"), ["/etc/"]);
    assert_eq!(offers("draconis cat disk.img:/e"), ["/etc/", "/exe"]);
    assert_eq!(offers("draconis cat disk.img:/etc/"), ["/etc/hosts", "/etc/ssl/", "/etc/systemd/"]);
    assert_eq!(offers("draconis cat disk.img:/etc/.h"), ["/etc/.hidden"]);
    assert_eq!(offers("draconis ls -l disk.img:/link/ho"), ["/link/hosts"]);
    assert_eq!(offers("draconis ls disk.img:/l"), ["/link/", "/lost+found/"]);
    assert_eq!(offers("draconis cp disk.img:/exe disk.img:/ho"), ["/home/"]);
    assert_eq!(offers(r"draconis cat my\ disk.img:/ex"), ["/exe"]);
    assert_eq!(offers(r"draconis cat disk.img:/a\ di"), ["/a dir/"]);
    assert_eq!(offers(r"draconis cat disk.img:/a\ dir/"), ["/a dir/x"]);

    // No completions and no messages for unreadable targets.
    for line in ["disk.img:/none/", "disk.img:/q", "broken.img:/", "none.img:/", "directory:/"] {
        assert!(offers(&format!("draconis cat {line}")).is_empty(), "{line}");
    }
    let mut disk = vec![0; 1 << 20];
    disk.extend(std::fs::read(&image).unwrap());
    std::fs::write(dir.join("inner"), disk).unwrap();
    assert_eq!(offers("draconis cat --offset 1M inner:/et"), ["/etc/"]);
    assert_eq!(offers("draconis cat --offset=1M inner:/et"), ["/etc/"]);
    assert!(offers("draconis cat inner:/et").is_empty());
}

#[test]
fn completion_helper_prints_raw_names_without_errors() {
    use std::os::unix::ffi::OsStrExt;
    let draconis = Draconis::new();
    let tree = draconis.make_dir("tree");
    for name in [&b"odd \xff\x1b"[..], b"two\nlines", b"plain"] {
        std::fs::write(tree.join(std::ffi::OsStr::from_bytes(name)), "x").unwrap();
    }
    let image = draconis.path("image");
    draconis.run_ok(["format", "--from", tree.to_str().unwrap(), image.to_str().unwrap()]);
    let ask = |path: &str| draconis.run(["complete-path", &format!("{}:{path}", image.display())]);
    assert_eq!(ask("/").stdout, b"/lost+found/\n/odd \xff\x1b\n/plain\n");
    assert_eq!(ask("/p").stdout, b"/plain\n");
    let output = ask("/none/x");
    assert_eq!((output.status.code(), output.stdout, output.stderr), (Some(1), vec![], vec![]));
    let bytes = std::fs::read(&image).unwrap();
    std::fs::write(&image, &bytes[..bytes.len() / 2]).unwrap();
    assert!(ask("/").stderr.is_empty());
    std::fs::write(&image, "").unwrap();
    assert!(ask("/").stderr.is_empty() && ask("/").stdout.is_empty());
    let output = draconis.run(["completions", "bash"]);
    assert!(output.status.success());
}
