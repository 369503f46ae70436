//! `draconis chmod`

use std::process::ExitCode;

use clap::Args;
use draconis_ext::{Follow, Inode, Volume};
use draconis_types::{AttributeChange, FileType};

use crate::edit::{self, NewFileOwner};
use crate::image::WriteArgs;
use crate::modes::ModeChange;
use crate::target::ImagePath;

/// Change file modes in a volume.
#[derive(Debug, Args)]
pub struct Arguments {
    /// Where the volume is.
    #[command(flatten)]
    place: WriteArgs,
    /// Change directories recursively.
    #[arg(short = 'R', long)]
    recursive: bool,
    /// Mode: octal, or symbolic such as u+x,go-w.
    #[arg(allow_hyphen_values = true)]
    mode: ModeChange,
    /// Files.
    #[arg(value_name = "IMAGE:/path", required = true)]
    targets: Vec<ImagePath>,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let NewFileOwner { umask, .. } = NewFileOwner::new(None);
    let change = |volume: &Volume, inode: &Inode| {
        let old = volume.attributes_of(inode).mode;
        let mode = arguments.mode.apply(old, inode.kind == FileType::Directory, umask);
        // Symbolic links have no mode.
        (inode.kind != FileType::Symlink)
            .then(|| AttributeChange { mode: Some(mode), ..AttributeChange::default() })
    };
    edit::for_each_target(&arguments.place, &arguments.targets, |volume, target| {
        edit::change_attributes(volume, target, arguments.recursive, Follow::Yes, &change)
    })
}
