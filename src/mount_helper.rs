//! Mount helper: how mount(8) calls this program for the type `fuse.draconis`.

use std::ffi::{OsStr, OsString};
use std::path::Path;

use clap::CommandFactory;

use crate::cli::Cli;

/// Names of the helper for the types `fuse.draconis`, `fuseblk.draconis` and
/// `draconis`.
const MOUNT_HELPER_NAMES: [&str; 3] =
    ["mount.fuse.draconis", "mount.fuseblk.draconis", "mount.draconis"];

/// Translates a call by mount(8) into `draconis mount`; leaves other calls unchanged. mount(8)
/// calls `mount.fuse.draconis IMAGE DIR [-sfnv] [-o OPTIONS] [-t TYPE]`, or through mount.fuse3
/// `draconis IMAGE DIR -o OPTIONS`.
pub fn translate_mount_helper_args(arguments: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let arguments: Vec<OsString> = arguments.collect();
    let called = arguments.first().and_then(|name| Path::new(name).file_name());
    let called = called.and_then(OsStr::to_str).unwrap_or_default();
    if !MOUNT_HELPER_NAMES.contains(&called) && !is_mount_helper_call(&arguments) {
        return arguments;
    }
    let mut translated: Vec<OsString> = vec!["draconis".into(), "mount".into()];
    let mut rest = arguments.into_iter().skip(1);
    while let Some(argument) = rest.next() {
        match argument.to_str() {
            // Everything but the mount.
            Some("-f") => translated.push("--fake".into()),
            // Sloppy options, no mtab entry, verbose: ignored.
            Some("-s" | "-n" | "-v") => {}
            Some("-t") => drop(rest.next()),
            _ => translated.push(argument),
        }
    }
    translated
}

/// Returns true for `IMAGE DIR -o OPTIONS` without a command.
fn is_mount_helper_call(arguments: &[OsString]) -> bool {
    let [_, image, dir, option, _] = arguments else { return false };
    let is_command = |name: &OsStr| {
        let name = name.to_str().unwrap_or_default();
        Cli::command().find_subcommand(name).is_some()
    };
    let starts = |word: &OsStr| word.as_encoded_bytes().first() == Some(&b'-');
    option == "-o" && !starts(image) && !starts(dir) && !is_command(image)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mount_helper_arguments_are_translated() {
        let helped = |line: &str| {
            let arguments = line.split(' ').map(OsString::from);
            translate_mount_helper_args(arguments).join(" ".as_ref()).into_string().unwrap()
        };
        assert_eq!(
            helped("/sbin/mount.fuse.draconis a.img /mnt -n -o ro,noatime -t fuse.draconis"),
            "draconis mount a.img /mnt -o ro,noatime"
        );
        assert_eq!(helped("mount.draconis a b -o rw"), "draconis mount a b -o rw");
        assert_eq!(helped("mount.draconis a b -f -o rw"), "draconis mount a b --fake -o rw");
        assert_eq!(
            helped("draconis /a.img /mnt -o rw,dev,suid"),
            "draconis mount /a.img /mnt -o rw,dev,suid"
        );
        for other in ["draconis mount -f a b", "draconis mount a -o ro", "draconis cp a -o b"] {
            assert_eq!(helped(other), other);
        }
    }
}
