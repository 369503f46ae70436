//! A new volume, empty or filled.

use std::path::Path;

use anyhow::Context;
use draconis_container::create::NewFormat;
use draconis_ext::mkfs::{self, FreeSpace, NodeId};
use draconis_types::path_bytes::ShowPath;
use rustix::io::Errno;

use super::current_time;
use crate::format::{self, FormatDestination};
use crate::overwrite::OverwritePermission;
use crate::populate::{
    self, DerivedFields, ExcludePatterns, FillOptions, ImageOptions, ImagePlatform, ScanResult,
    SourceSpec,
};
use crate::uuid::UuidGenerator;
use crate::{Error, Result};

/// Specification of a new volume, empty or filled.
#[derive(Clone, Debug)]
pub struct NewVolume {
    /// `ext2`, `ext3` or `ext4`.
    pub kind: String,
    /// Length; if `None`, that of the image; for a new file, as needed for the contents.
    pub len_bytes: Option<u64>,
    /// Free space if the length is computed from the sources.
    pub free: FreeSpace,
    /// True for the smallest volume that holds the sources, also on a longer device.
    pub min: bool,
    /// Block size; depends on the length if `None`.
    pub block_bytes: Option<u32>,
    /// Label, at most 16 bytes.
    pub label: Vec<u8>,
    /// Features to set, or with `^` to clear, separated by commas, as `mke2fs -O` spells them.
    pub features: String,
    /// Number of inodes; depends on the length if `None`.
    pub inodes: Option<u32>,
    /// Reserved blocks in millionths of all blocks; 50,000 if `None`.
    pub reserved_ppm: Option<u32>,
    /// Owner of the root directory; if `None`, that of the source or the calling user.
    pub owner: Option<(u32, u32)>,
    /// UUID; random if `None`.
    pub uuid: Option<[u8; 16]>,
    /// Sources of the contents.
    pub from: Vec<SourceSpec>,
    /// Patterns of names to exclude, as for `tar --exclude`.
    pub exclude: Vec<Vec<u8>>,
    /// Platform to choose from a multi-platform image; that of this machine if `None`.
    pub platform: Option<ImagePlatform>,
    /// Limit for the decompressed size of an archive; if `None`, 16 GiB plus 100 times its length.
    pub max_unpacked_bytes: Option<u64>,
    /// Owner of all files, instead of their own.
    pub owner_override: Option<(u32, u32)>,
    /// Sets the owner of all files to root, and clears group and other permissions.
    pub squash: bool,
    /// Derives times and UUIDs from the sources, so that equal sources give equal bytes.
    pub reproducible: bool,
    /// Format of the disk image to create around the volume; raw if `None`.
    pub image_format: Option<NewFormat>,
    /// Contents of the image that may be overwritten.
    pub force: OverwritePermission,
}

impl Default for NewVolume {
    fn default() -> Self {
        Self {
            kind: "ext4".into(),
            len_bytes: None,
            free: FreeSpace::Usual,
            min: false,
            block_bytes: None,
            label: vec![],
            features: String::new(),
            inodes: None,
            reserved_ppm: None,
            owner: None,
            uuid: None,
            from: vec![],
            exclude: vec![],
            platform: None,
            max_unpacked_bytes: None,
            owner_override: None,
            squash: false,
            reproducible: false,
            image_format: None,
            force: OverwritePermission::Nothing,
        }
    }
}

/// Result of creating a volume.
#[derive(Clone, Default, Debug)]
pub struct CreatedVolume {
    /// Notes for the user: skipped items, and entries that are probably unintended.
    pub notes: Vec<String>,
    /// Configuration of the last container image, as JSON.
    pub config: Option<Vec<u8>>,
}

/// Parses the name of a disk image format.
///
/// # Errors
/// There is no such format, or it cannot be created.
pub fn image_format(name: Option<&str>) -> Result<Option<NewFormat>> {
    match name {
        None | Some("raw") => Ok(None),
        Some("qcow2") => Ok(Some(NewFormat::Qcow2)),
        Some("vhdx") => Ok(Some(NewFormat::Vhdx)),
        Some(other) => {
            let text = format!("{other}: raw, qcow2 and vhdx images are made");
            Err(Error::new(Errno::INVAL, text))
        }
    }
}
pub(super) fn create(image: &Path, new: &NewVolume) -> anyhow::Result<CreatedVolume> {
    let shown = image.shown();
    let defaults = mkfs::FormatOptions::for_type(&new.kind)
        .with_context(|| format!("{}: no such type; ext2, ext3 and ext4 are made", new.kind))?;
    let mut identities = UuidGenerator::new(None);
    // An empty volume belongs to the calling user. Owners that a source does not give are root.
    let user = match new.from.is_empty() {
        true => (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw()),
        false => (0, 0),
    };
    let mut options = mkfs::FormatOptions {
        block_bytes: new.block_bytes,
        label: new.label.clone(),
        time: u32::try_from(current_time().seconds).context("the clock")?,
        root_owner: new.owner.unwrap_or(user),
        uuid: new.uuid.unwrap_or_else(|| identities.uuid()),
        hash_seed: identities.uuid(),
        inodes: new.inodes.map_or(defaults.inodes, mkfs::InodeCount::Count),
        reserved_ppm: new.reserved_ppm.unwrap_or(defaults.reserved_ppm),
        ..defaults
    };
    options.apply_features(&new.features)?;
    let base = FormatDestination::open(image, || Ok(()))?;
    base.check_overwrite(image, &new.force, "force")?;
    let base = match new.image_format {
        None => base.preserve_vhd_footer()?,
        Some(_) => base,
    };
    let filling = FillOptions {
        from: &new.from,
        list: None,
        exclude: &ExcludePatterns::new(new.exclude.iter().map(Vec::as_slice)),
        image_options: ImageOptions {
            platform: new.platform.clone(),
            temp_dir_of: image,
            limit: new.max_unpacked_bytes,
        },
        owner: new.owner_override,
        squash: new.squash,
        squash_perms: new.squash,
        table: None,
        clamp_times: false,
        reproducible: new.reproducible.then(|| DerivedFields {
            time: true,
            uuid: new.uuid.is_none(),
            hash_seed: true,
        }),
    };
    let ScanResult { mut source, config } =
        populate::scan_sources_and_derive(filling, &mut options)?;
    if let (Some((uid, gid)), Some(root)) = (new.owner, source.tree.node_mut(NodeId::ROOT)) {
        (root.uid, root.gid) = (uid, gid);
    }
    let (there, is_given) = (base.len_bytes()?, base.has_fixed_size()?);
    let tree = &mut source.tree;
    let fills = is_given || (there > 0 && new.from.is_empty());
    let plan = match new.len_bytes.or((fills && !new.min).then_some(there)) {
        Some(len) => mkfs::plan_for_size(&options, tree, len)?,
        None if new.from.is_empty() => {
            return Err(crate::not_found_error(format!(
                "{shown} does not exist: a size is needed"
            )));
        }
        None if new.min => FreeSpace::Bytes(0).plan_volume(&options, tree)?,
        None => new.free.plan_volume(&options, tree)?,
    };
    let needed = plan.layout().len_bytes();
    if is_given && needed > there {
        let (has, needed) =
            (crate::messages::format_bytes(there), crate::messages::format_bytes(needed));
        return Err(Error::new(Errno::NOSPC, format!("{shown} has only {has} of {needed}")).into());
    }
    format::write(image, base, &plan, &*source.contents, new.image_format, &|_| {})?;
    let mut notes = source.notes;
    notes.extend(source.faults.messages());
    Ok(CreatedVolume { notes, config })
}
