//! `draconis ln`

use std::os::unix::ffi::OsStrExt;
use std::process::ExitCode;

use anyhow::ensure;
use draconis_exchange::contract::Kind;
use draconis_ext::{Follow, InodeNumber, NewNode, Volume};

use crate::change::{self, Home, Maker};
use crate::cli::Ln;
use crate::image::find;
use crate::target::Target;

pub fn run(arguments: &Ln) -> anyhow::Result<ExitCode> {
    let Ln { target, link, symbolic, force, .. } = arguments;
    let maker = Maker::new(arguments.owner);
    // Only a hard link is a name for something in the image.
    let existing = Target::from(target.clone());
    ensure!(
        *symbolic || existing.image == link.image,
        "{}: a hard link stays in its image; ln -s makes a symbolic one",
        target.display()
    );
    let own = match symbolic {
        true => target.as_bytes().rsplit(|byte| *byte == b'/').next().unwrap_or_default(),
        false => existing.file_name(),
    };
    change::change(&link.image, arguments.place, |volume| {
        let home = change::destination(volume, link, !arguments.no_target_directory, own)?;
        ensure!(!home.name.is_empty(), "{link}: the link needs a name");
        let found = if *symbolic { None } else { Some(find(volume, &existing, Follow::No)?) };
        if *force {
            make_way(volume, &home, link, found)?;
        }
        let done = match found {
            Some(found) if home.lookup(volume)?.is_some_and(|it| it.number == found) && *force => {
                Ok(())
            }
            Some(found) => volume.link(found, home.dir, &home.name),
            None => {
                let new = NewNode {
                    kind: Kind::Symlink,
                    mode: 0o777,
                    uid: maker.uid,
                    gid: maker.gid,
                    device: (0, 0),
                    target: target.as_bytes(),
                };
                volume.create(home.dir, &home.name, &new).map(drop)
            }
        };
        done.map_err(|error| change::tell(link, error))?;
        Ok(ExitCode::SUCCESS)
    })
}

/// Removes what has the name, unless it is what the link is to name.
fn make_way(
    volume: &Volume,
    home: &Home,
    link: &Target,
    found: Option<InodeNumber>,
) -> anyhow::Result<()> {
    match home.lookup(volume)? {
        Some(there) if found == Some(there.number) => Ok(()),
        Some(there) => {
            ensure!(there.kind != Kind::Directory, "{link}: is a directory");
            volume.unlink(home.dir, &home.name).map_err(|error| change::tell(link, error))
        }
        None => Ok(()),
    }
}
