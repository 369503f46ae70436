//! `draconis lab`: becomes the program beside this one, which carries what measuring needs.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, ExitCode};

use anyhow::Context;

/// The program.
const NAME: &str = "draconis-lab";

pub fn run(arguments: &[OsString]) -> anyhow::Result<ExitCode> {
    let beside = std::env::current_exe().ok().map(|own| own.with_file_name(NAME));
    // Where it is installed elsewhere, by its name.
    let program = beside.filter(|path| path.exists()).unwrap_or_else(|| PathBuf::from(NAME));
    let error = Command::new(&program).args(arguments).exec();
    Err(error).with_context(|| format!("{}, the program that measures", program.display()))
}
