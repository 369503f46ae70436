//! Tests that run in a process of their own, and tests that play a process for another test.

use std::process::Command;

const OWN_PROCESS_VARIABLE: &str = "DRACONIS_TEST_PROCESS";

/// Removes the name of the test binary's crate from a path of modules.
fn test_name(path: &str) -> &str {
    path.split_once("::").map_or(path, |(_, name)| name)
}

/// Returns a command that runs one test of this binary; `path` is its path with the crate's name.
/// Use [`child_test!`](crate::child_test).
pub fn child_test_command(path: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("a test binary has a path"));
    command.args(["--exact", test_name(path), "--nocapture", "--include-ignored"]);
    command.arg("--test-threads=1");
    command
}

/// Runs the test that `function` is in again, in a process of its own; returns true in that
/// process. Use [`in_own_process!`](crate::in_own_process).
pub fn is_in_own_process(function: &str) -> bool {
    let test = function.rsplit_once("::").map_or(function, |(test, _)| test);
    if std::env::var(OWN_PROCESS_VARIABLE).is_ok_and(|name| name == test) {
        return true;
    }
    let mut command = child_test_command(test);
    // The standard library's lock for backtraces of errors may be held for ever in a forked child.
    command.env(OWN_PROCESS_VARIABLE, test).env("RUST_LIB_BACKTRACE", "0");
    let output = command.output();
    let output = output.expect("a test binary starts");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    eprint!("{}", text(&output.stderr));
    let printed = text(&output.stdout);
    assert!(output.status.success(), "{printed}");
    assert!(printed.contains("1 passed"), "no test is named {test}: {printed}");
    false
}

/// Returns a command that runs the test function `$test` of this module in another process.
#[macro_export]
macro_rules! child_test {
    ($test:ident) => {
        $crate::child_test_command(concat!(module_path!(), "::", stringify!($test)))
    };
}

/// Runs the rest of a test in a process that runs no other test: for those that look at what a
/// whole process has, such as its memory, descriptors, or counters. Only for tests that return `()`.
#[macro_export]
macro_rules! in_own_process {
    () => {
        fn own_process_marker() {}
        if !$crate::is_in_own_process(std::any::type_name_of_val(&own_process_marker)) {
            return;
        }
    };
}

#[cfg(test)]
mod tests {
    #[test]
    fn own_processes_run_one_test() {
        crate::in_own_process!();
        let arguments: Vec<_> = std::env::args().collect();
        assert!(arguments.contains(&"child::tests::own_processes_run_one_test".to_owned()));
    }

    #[test]
    fn child_tests_are_found_by_name() {
        let output = crate::child_test!(own_processes_run_one_test).output().unwrap();
        assert!(String::from_utf8_lossy(&output.stdout).contains("1 passed"), "{output:?}");
    }
}
