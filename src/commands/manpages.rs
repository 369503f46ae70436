//! `draconis manpages`, generated from the clap definition.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Command};
use draconis_access::destination::ReadSources;

use crate::manual;

/// Write the manual pages to a directory.
#[derive(Debug, Args)]
pub struct Arguments {
    /// Output directory.
    dir: PathBuf,
}

pub fn run(arguments: &Arguments, line: Command) -> anyhow::Result<ExitCode> {
    let sources = ReadSources::new();
    for page in manual::generate_pages(line)? {
        let path = arguments.dir.join(&page.file_name);
        sources.write(&path, &page.text)?;
    }
    Ok(ExitCode::SUCCESS)
}
