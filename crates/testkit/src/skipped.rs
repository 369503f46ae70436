//! Skipping tests whose requirements are missing.

use std::fmt::Display;
use std::io::Write;

/// Reports a skipped test. With `DRACONIS_REQUIRE=all` the machine should have all requirements, so
/// this is a failure, unless a word of `DRACONIS_LACKS` is in `what`.
#[track_caller]
pub fn report_skipped(what: impl Display) {
    let what = what.to_string();
    let list = |name| std::env::var(name).unwrap_or_default();
    let lacks = list("DRACONIS_LACKS");
    let is_known = lacks.split_whitespace().any(|word| what.contains(word));
    assert!(
        list("DRACONIS_REQUIRE") != "all" || is_known,
        "DRACONIS_REQUIRE=all, but this would be skipped: {what}"
    );
    eprintln!("skipped: {what}");
    // Read by `tools/test-run`, which counts and names what was skipped.
    if let Some(path) = std::env::var_os("DRACONIS_SKIPPED")
        && let Ok(mut list) = std::fs::File::options().append(true).open(path)
    {
        let _ = writeln!(list, "{}", what.replace('\n', " "));
    }
}
