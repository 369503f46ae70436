//! `draconis lab`: executes draconis-lab, which has the benchmarks and crash tests.

use std::ffi::OsString;
use std::io::ErrorKind;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, ExitCode};

use anyhow::{Context, bail};
use clap::Args;
use draconis_types::path_bytes::ShowPath;

/// Run benchmarks and crash tests.
///
/// Runs the program draconis-lab, installed next to this one, with the remaining arguments: list,
/// run, report, compare, crash and others.
#[derive(Debug, Args)]
#[command(disable_help_flag = true)]
pub struct Arguments {
    /// Arguments of draconis-lab.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<OsString>,
}

/// Name of the program.
const LAB_PROGRAM: &str = "draconis-lab";

pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let beside = std::env::current_exe().ok().map(|own| own.with_file_name(LAB_PROGRAM));
    // If it is not in the same directory, it is searched in PATH.
    let program = beside.filter(|path| path.exists()).unwrap_or_else(|| PathBuf::from(LAB_PROGRAM));
    let error = Command::new(&program).args(&arguments.arguments).exec();
    if error.kind() == ErrorKind::NotFound {
        bail!(
            "{LAB_PROGRAM}, the program that measures, is neither beside this one nor in PATH: \
             `cargo build --release -p {LAB_PROGRAM}` in the sources builds it, and `make install-lab` \
             installs it"
        );
    }
    Err(error).with_context(|| program.shown().to_string())
}
