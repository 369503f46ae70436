//! `draconis touch`

use std::process::ExitCode;

use clap::Args;
use draconis_types::{AttributeChange, SetTime, Time};

use crate::edit::{self, NewFileOwner};
use crate::image::WriteArgs;
use crate::target::ImagePath;
use crate::text;

/// Set file timestamps in a volume, creating missing files.
#[derive(Debug, Args)]
pub struct Arguments {
    /// Where the volume is.
    #[command(flatten)]
    place: WriteArgs,
    /// Change only the access time.
    #[arg(short)]
    access: bool,
    /// Change only the modification time.
    #[arg(short)]
    modification: bool,
    /// Do not create files.
    #[arg(short = 'c', long)]
    no_create: bool,
    /// Use TIME instead of the current time: 2026-11-20, 2026-11-20 23:36:01, or @SECONDS.
    #[arg(short, long, value_name = "TIME", value_parser = text::parse_time)]
    date: Option<Time>,
    /// Files.
    #[arg(value_name = "IMAGE:/path", required = true)]
    targets: Vec<ImagePath>,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let maker = NewFileOwner::new(None);
    let time = arguments.date.map_or(SetTime::Now, SetTime::To);
    let both = !arguments.access && !arguments.modification;
    let change = AttributeChange {
        accessed: (both || arguments.access).then_some(time),
        modified: (both || arguments.modification).then_some(time),
        ..AttributeChange::default()
    };
    edit::for_each_target(&arguments.place, &arguments.targets, |volume, target| {
        let Some(found) = edit::find_or_create(volume, target, maker, !arguments.no_create)? else {
            return Ok(());
        };
        let done = volume.set_attributes(found, &change);
        done.map(drop).map_err(|error| edit::with_context(target, error))
    })
}
