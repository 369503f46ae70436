//! `draconis chmod`

use std::process::ExitCode;

use clap::Args;
use draconis_exchange::contract::{AttributeChange, Kind};
use draconis_ext::{Follow, Inode, Volume};

use crate::change::{self, Maker};
use crate::image::Place;
use crate::modes::ModeChange;
use crate::target::Target;

/// Change file modes in a volume.
#[derive(Debug, Args)]
pub struct Arguments {
    /// Where the volume is.
    #[command(flatten)]
    place: Place,
    /// Change directories recursively.
    #[arg(short = 'R', long)]
    recursive: bool,
    /// Mode: octal, or symbolic such as u+x,go-w.
    #[arg(allow_hyphen_values = true)]
    mode: ModeChange,
    /// Files.
    #[arg(value_name = "IMAGE:/path", required = true)]
    targets: Vec<Target>,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let Maker { umask, .. } = Maker::new(None);
    let change = |volume: &Volume, inode: &Inode| {
        let old = volume.attributes_of(inode).mode;
        let mode = arguments.mode.apply(old, inode.kind == Kind::Directory, umask);
        // A symbolic link has no mode of its own.
        (inode.kind != Kind::Symlink)
            .then(|| AttributeChange { mode: Some(mode), ..AttributeChange::default() })
    };
    change::each(&arguments.place, &arguments.targets, |volume, target| {
        change::attributes(volume, target, arguments.recursive, Follow::Yes, &change)
    })
}
