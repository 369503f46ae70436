//! Features that are added or dropped in place, and what each of them needs.

use super::{Changes, Error, Result, Work, seed_of};
use crate::format::features::{Compatible, Incompatible, ReadOnlyCompatible};
use crate::format::quota::Kind;
use crate::format::superblock::{CHECKSUM_CRC32C, RawSuperblock, Superblock};

/// Of `s_log_groups_per_flex`, where groups were not flexible before: sixteen.
const FLEX_GROUPS_LOG: u8 = 4;
/// `half_md4`.
const HASH_VERSION: u8 = 1;

/// A feature of either set.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Feature {
    C(Compatible),
    I(Incompatible),
    R(ReadOnlyCompatible),
}

impl Feature {
    fn named(name: &str) -> Option<Self> {
        Compatible::named(name)
            .map(Self::C)
            .or_else(|| Incompatible::named(name).map(Self::I))
            .or_else(|| ReadOnlyCompatible::named(name).map(Self::R))
    }

    fn is_in(self, raw: &RawSuperblock) -> bool {
        let [compatible, incompatible, read_only] = raw.features();
        match self {
            Self::C(it) => compatible & it.bits() != 0,
            Self::I(it) => incompatible & it.bits() != 0,
            Self::R(it) => read_only & it.bits() != 0,
        }
    }

    fn set(self, raw: &mut RawSuperblock, on: bool) {
        let [mut compatible, mut incompatible, mut read_only] = raw.features();
        let (word, bits) = match self {
            Self::C(it) => (&mut compatible, it.bits()),
            Self::I(it) => (&mut incompatible, it.bits()),
            Self::R(it) => (&mut read_only, it.bits()),
        };
        *word = if on { *word | bits } else { *word & !bits };
        raw.set_features([compatible, incompatible, read_only]);
    }
}

/// Adds and drops features.
pub(super) fn change(
    raw: &mut RawSuperblock,
    super_: &Superblock,
    changes: &Changes,
    work: &mut Work,
) -> Result<()> {
    if !changes.features.is_empty() && super_.revision.0 == 0 {
        let what = "-O: a volume of revision 0 has no features";
        return Err(Error::Unsupported(what.to_owned()));
    }
    let is_added = |name: &String| name == "has_journal";
    let adds_journal = changes.features.iter().any(is_added);
    if changes.journal_mib.is_some() && !adds_journal {
        return Err(Error::Misuse("-J size: needs -j or -O has_journal".to_owned()));
    }
    for word in &changes.features {
        let (name, on) = match word.strip_prefix('^') {
            Some(name) => (name, false),
            None => (word.as_str(), true),
        };
        let name = if name == "extents" { "extent" } else { name };
        let feature = Feature::named(name);
        let feature =
            feature.ok_or_else(|| Error::Misuse(format!("-O {name}: no such feature")))?;
        if feature.is_in(raw) == on {
            continue;
        }
        match on {
            true => add(raw, super_, feature, name, changes, work)?,
            false => remove(raw, super_, feature, name, work)?,
        }
        feature.set(raw, on);
    }
    let has = |feature: Feature| feature.is_in(raw);
    let orphans = Feature::C(Compatible::ORPHAN_FILE);
    if has(orphans) && !has(Feature::C(Compatible::HAS_JOURNAL)) {
        let what = "-O: the file of orphans needs a journal: ^orphan_file with ^has_journal";
        return Err(Error::Misuse(what.to_owned()));
    }
    let had = super_.compatible.contains(Compatible::ORPHAN_FILE);
    work.hidden.orphans = (has(orphans) != had).then(|| has(orphans));
    work.hidden.quotas = quotas(raw, super_, changes)?;
    Ok(())
}

/// Whose quotas are to be counted, where that changes.
fn quotas(
    raw: &mut RawSuperblock,
    super_: &Superblock,
    changes: &Changes,
) -> Result<Option<[bool; 3]>> {
    let feature = Feature::R(ReadOnlyCompatible::QUOTA);
    let has_projects = Feature::R(ReadOnlyCompatible::PROJECT).is_in(raw);
    let had = super_.read_only_compatible.contains(ReadOnlyCompatible::QUOTA);
    let there = super_.quotas.map(|inode| had && inode != 0);
    let mut wanted = match (had, feature.is_in(raw)) {
        (false, true) => [true, true, has_projects],
        (true, false) => [false; 3],
        (true, true) if has_projects => {
            let [users, groups, _] = there;
            [users, groups, true]
        }
        _ => there,
    };
    let [users, groups, projects] = &mut wanted;
    for (kind, is_wanted) in &changes.quotas {
        match kind {
            Kind::User => *users = *is_wanted,
            Kind::Group => *groups = *is_wanted,
            Kind::Project => *projects = *is_wanted,
        }
    }
    if *projects && !has_projects {
        return Err(Error::Misuse("-Q prjquota: needs project (-O)".to_owned()));
    }
    if wanted != there && super_.incompatible.contains(Incompatible::EA_INODE) {
        let what = "-O quota: values of attributes in inodes (ea_inode) are not counted here";
        return Err(Error::Unsupported(what.to_owned()));
    }
    feature.set(raw, wanted.contains(&true));
    Ok((wanted != there).then_some(wanted))
}

fn add(
    raw: &mut RawSuperblock,
    super_: &Superblock,
    feature: Feature,
    name: &str,
    changes: &Changes,
    work: &mut Work,
) -> Result<()> {
    let needs = |other: Feature, other_name: &str| match other.is_in(raw) {
        true => Ok(()),
        false => Err(Error::Misuse(format!("-O {name}: needs {other_name}"))),
    };
    match feature {
        Feature::C(Compatible::HAS_JOURNAL) => work.journal = Some(true),
        Feature::C(Compatible::DIR_INDEX) => {
            if raw.s_hash_seed.iter().all(|word| word.get() == 0) {
                let seed = changes.hash_seed.as_chunks::<4>().0;
                for (to, from) in raw.s_hash_seed.iter_mut().zip(seed) {
                    *to = u32::from_le_bytes(*from).into();
                }
            }
            if raw.s_def_hash_version == 0 {
                raw.s_def_hash_version = HASH_VERSION;
            }
        }
        Feature::C(Compatible::STABLE_INODES)
        | Feature::I(Incompatible::EXTENTS | Incompatible::LARGEDIR)
        | Feature::R(
            ReadOnlyCompatible::LARGE_FILE
            | ReadOnlyCompatible::HUGE_FILE
            | ReadOnlyCompatible::DIR_NLINK
            | ReadOnlyCompatible::READONLY,
        ) => {}
        Feature::R(ReadOnlyCompatible::METADATA_CSUM) => {
            // Descriptors have one checksum or the other.
            Feature::R(ReadOnlyCompatible::GDT_CSUM).set(raw, false);
            raw.s_checksum_type = CHECKSUM_CRC32C;
            work.reseals = true;
        }
        Feature::R(ReadOnlyCompatible::VERITY) => {
            needs(Feature::I(Incompatible::EXTENTS), "extent")?;
        }
        Feature::I(Incompatible::FLEX_BG) => {
            if raw.s_log_groups_per_flex == 0 {
                raw.s_log_groups_per_flex = FLEX_GROUPS_LOG;
            }
        }
        Feature::I(Incompatible::MMP) => work.guard = Some(true),
        Feature::R(ReadOnlyCompatible::PROJECT) if super_.inode_bytes >= 256 => {}
        Feature::R(ReadOnlyCompatible::QUOTA) | Feature::C(Compatible::ORPHAN_FILE) => {}
        Feature::I(Incompatible::EA_INODE) if super_.inode_bytes >= 128 => {}
        Feature::I(Incompatible::CSUM_SEED) => {
            needs(Feature::R(ReadOnlyCompatible::METADATA_CSUM), "metadata_csum")?;
            raw.s_checksum_seed = seed_of(&super_.uuid).into();
            raw.s_checksum_type = CHECKSUM_CRC32C;
        }
        _ => {
            return Err(Error::Unsupported(format!(
                "-O {name}: not added in place here; tune2fs -O {name} and e2fsck -f may do it"
            )));
        }
    }
    Ok(())
}

fn remove(
    raw: &mut RawSuperblock,
    super_: &Superblock,
    feature: Feature,
    name: &str,
    work: &mut Work,
) -> Result<()> {
    match feature {
        Feature::C(Compatible::HAS_JOURNAL) => {
            if super_.journal_device != 0 {
                let what = "-O ^has_journal: the journal is on another device; use tune2fs";
                return Err(Error::Unsupported(what.to_owned()));
            }
            Feature::C(Compatible::FAST_COMMIT).set(raw, false);
            work.journal = Some(false);
        }
        Feature::R(ReadOnlyCompatible::READONLY | ReadOnlyCompatible::QUOTA)
        | Feature::C(Compatible::ORPHAN_FILE) => {}
        Feature::I(Incompatible::MMP) => work.guard = Some(false),
        Feature::C(Compatible::DIR_INDEX) => work.lists = true,
        Feature::R(ReadOnlyCompatible::METADATA_CSUM) => {
            // Groups that were never initialised keep saying so.
            Feature::R(ReadOnlyCompatible::GDT_CSUM).set(raw, true);
            Feature::I(Incompatible::CSUM_SEED).set(raw, false);
            raw.s_checksum_seed = 0.into();
            raw.s_checksum_type = 0;
            raw.s_checksum = 0.into();
            if super_.incompatible.contains(Incompatible::EA_INODE)
                && super_.incompatible.contains(Incompatible::CSUM_SEED)
            {
                let what = "-O ^metadata_csum: values of attributes in inodes are hashed with \
                            its seed";
                return Err(Error::Unsupported(what.to_owned()));
            }
            work.reseals = true;
        }
        Feature::I(Incompatible::CSUM_SEED) => {
            let is_of_uuid = raw.s_checksum_seed.get() == seed_of(&super_.uuid);
            if !is_of_uuid && super_.incompatible.contains(Incompatible::EA_INODE) {
                let what = "-O ^metadata_csum_seed: values of attributes in inodes are hashed \
                            with it";
                return Err(Error::Unsupported(what.to_owned()));
            }
            work.reseals |= !is_of_uuid;
            raw.s_checksum_seed = 0.into();
        }
        _ => {
            return Err(Error::Unsupported(format!(
                "-O ^{name}: not dropped in place here; tune2fs -O ^{name} and e2fsck -f may do it"
            )));
        }
    }
    Ok(())
}
