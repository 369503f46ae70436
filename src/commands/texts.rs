//! Shell completions and manual pages, made from the command line's own description.

use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

use anyhow::Context;
use clap::CommandFactory;
use clap_complete::Shell;

use crate::cli::Cli;
use crate::manual;

/// What bash needs besides: paths, on this machine and in images.
const BASH_PATHS: &str = include_str!("texts/paths.bash");

pub fn completions(shell: Shell) -> anyhow::Result<ExitCode> {
    let mut script = vec![];
    clap_complete::generate(shell, &mut Cli::command(), "draconis", &mut script);
    if shell == Shell::Bash {
        script.extend_from_slice(BASH_PATHS.as_bytes());
    }
    std::io::stdout().write_all(&script)?;
    Ok(ExitCode::SUCCESS)
}

pub fn manpages(dir: &Path) -> anyhow::Result<ExitCode> {
    for page in manual::pages(Cli::command())? {
        let path = dir.join(&page.file_name);
        std::fs::write(&path, page.text).with_context(|| path.display().to_string())?;
    }
    Ok(ExitCode::SUCCESS)
}
