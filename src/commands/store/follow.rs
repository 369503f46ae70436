//! `--follow SECONDS`: commands that print a store's contents again whenever a writer has changed
//! them.
//!
//! Law 1: each printed view is one commit of the writer, or a later state that prints the same.
//! Law 2: a store that cannot be read for a while is reported once, and looked for again.

use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use draconis_objects::{Error, Result, Store};
use draconis_types::path_bytes::ShowPath;

use super::open::{open_follower, with_context};
use crate::report;

/// How a command follows a writer.
#[derive(Debug, Args)]
pub struct FollowArgs {
    /// Read the store while another process writes it: look every SECONDS for changes, and print
    /// everything again, with an empty line behind it, when the output differs. Until interrupted.
    #[arg(long, value_name = "SECONDS", value_parser = parse_interval)]
    pub follow: Option<Duration>,
}

fn parse_interval(text: &str) -> std::result::Result<Duration, String> {
    let seconds = text.parse::<f64>().ok().filter(|seconds| (0.01..=86400.0).contains(seconds));
    let interval = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    interval.ok_or_else(|| format!("'{text}' is not a number of seconds from 0.01 to 86400"))
}

/// Prints what `render` makes of the store, and again whenever that differs.
pub fn print_changes(
    device: &Path,
    interval: Duration,
    mut render: impl FnMut(&Arc<Store>) -> Result<Vec<u8>>,
) -> anyhow::Result<()> {
    let mut store = open_follower(device)?;
    let mut printed: Option<Vec<u8>> = None;
    let mut reported: Option<String> = None;
    let mut changed = Ok(true);
    loop {
        let rendered = match changed {
            Ok(true) => store.read_newest(&mut render).map(Some),
            Ok(false) => Ok(None),
            Err(error) => Err(error),
        };
        // Rendered again at the next look, even without a newer commit.
        let mut failed = None;
        match rendered {
            Ok(text) => {
                if text.is_some() && text != printed {
                    print(text.as_deref().unwrap_or_default())?;
                    printed = text;
                }
                if reported.take().is_some() {
                    report::warn_line(format!("{}: it can be read again", device.shown()));
                }
            }
            // It was resized, or created anew.
            Err(Error::NotAStore(why)) => match open_follower(device) {
                Ok(opened) => {
                    store = opened;
                    changed = Ok(true);
                    continue;
                }
                Err(error) => failed = Some(format!("{error:#} ({why})")),
            },
            Err(error) => failed = Some(format!("{:#}", with_context(device, error))),
        }
        if failed.is_some() && failed != reported {
            failed.iter().for_each(|why| report::warn_line(why.clone()));
            reported.clone_from(&failed);
        }
        std::thread::sleep(interval);
        changed = store.refresh().map(|changed| changed || failed.is_some());
    }
}

fn print(text: &[u8]) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(text)?;
    out.write_all(b"\n")?;
    out.flush()
}
