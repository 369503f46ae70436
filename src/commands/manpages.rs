//! `draconis manpages`, made from the command line's own description.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::{Args, Command};

use crate::manual;

/// Write the manual pages into a directory.
#[derive(Debug, Args)]
pub struct Arguments {
    /// The directory.
    dir: PathBuf,
}

pub fn run(arguments: &Arguments, line: Command) -> anyhow::Result<ExitCode> {
    for page in manual::pages(line)? {
        let path = arguments.dir.join(&page.file_name);
        std::fs::write(&path, page.text).with_context(|| path.display().to_string())?;
    }
    Ok(ExitCode::SUCCESS)
}
