//! Manual pages and shell completions, made from the command line's own description.

use std::path::Path;
use std::process::ExitCode;

use anyhow::Context;
use clap::CommandFactory;

use crate::cli::Cli;

pub fn completions(shell: clap_complete::Shell) -> anyhow::Result<ExitCode> {
    clap_complete::generate(shell, &mut Cli::command(), "draconis", &mut std::io::stdout());
    Ok(ExitCode::SUCCESS)
}

pub fn manpages(dir: &Path) -> anyhow::Result<ExitCode> {
    clap_mangen::generate_to(Cli::command(), dir).with_context(|| dir.display().to_string())?;
    Ok(ExitCode::SUCCESS)
}
