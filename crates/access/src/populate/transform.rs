//! Changes to a tree before it is written: exclusions, owners, permissions, times.

use draconis_ext::mkfs::{NodeId, NodeKind, Tree, TreeNode};
use draconis_types::Time;

use super::TimestampPolicy;

/// Patterns of names to exclude, as for `tar --exclude` and `.gitignore`.
#[derive(Default, Debug)]
pub struct ExcludePatterns(Vec<PathPattern>);

/// Pattern of paths. One with an inner slash is a path from the root, one without matches in any
/// directory; one that ends with a slash matches only directories.
#[derive(Debug)]
pub struct PathPattern {
    /// Components from the root; `**` matches any number of names.
    names: Vec<Vec<u8>>,
    /// True if the pattern matches a name in any directory.
    anywhere: bool,
    only_dirs: bool,
}

impl PathPattern {
    /// Parses a pattern.
    pub fn new(text: &[u8]) -> Self {
        let only_dirs = text.ends_with(b"/");
        let text = text.strip_suffix(b"/").unwrap_or(text);
        Self { anywhere: !text.contains(&b'/'), names: path_names(text), only_dirs }
    }

    /// Returns true if the pattern matches a path of the root directory.
    pub fn matches(&self, path: &[u8], is_dir: bool) -> bool {
        let names = path_names(path);
        (is_dir || !self.only_dirs)
            && match (self.anywhere, self.names.first(), names.last()) {
                (true, Some(it), Some(name)) => match_component(it, name),
                _ => match_path(&self.names, &names),
            }
    }
}

fn path_names(path: &[u8]) -> Vec<Vec<u8>> {
    path.split(|byte| *byte == b'/')
        .filter(|name| !matches!(*name, b"" | b"."))
        .map(<[u8]>::to_vec)
        .collect()
}

impl ExcludePatterns {
    /// Parses patterns.
    pub fn new<'a>(patterns: impl IntoIterator<Item = &'a [u8]>) -> Self {
        let all = patterns.into_iter().map(PathPattern::new);
        Self(all.filter(|it| !it.names.is_empty()).collect())
    }

    /// Returns true if there are no patterns.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns true if `name` in a directory of the tree is excluded.
    pub fn matches(&self, tree: &Tree, dir: NodeId, name: &[u8], is_dir: bool) -> bool {
        let fits = |pattern: &PathPattern| {
            if pattern.only_dirs && !is_dir {
                return false;
            }
            if pattern.anywhere {
                return pattern.names.first().is_some_and(|it| match_component(it, name));
            }
            let mut path = tree.path_components(dir);
            path.push(name.to_vec());
            match_path(&pattern.names, &path)
        };
        self.0.iter().any(fits)
    }
}

/// Returns true if a path matches a pattern in which `**` is any number of names.
fn match_path(pattern: &[Vec<u8>], path: &[Vec<u8>]) -> bool {
    match_with_wildcards(pattern, path, |it| it == b"**", |it, name| match_component(it, name))
}

/// Returns true if a name matches a pattern with `*`, `?` and `[..]`.
fn match_component(pattern: &[u8], name: &[u8]) -> bool {
    match_with_wildcards(
        &tokenize(pattern),
        name,
        |it| matches!(it, GlobToken::Any),
        GlobToken::match_glob,
    )
}

enum GlobToken {
    Any,
    One,
    Byte(u8),
    Of { not: bool, ranges: Vec<(u8, u8)> },
}

impl GlobToken {
    fn match_glob(&self, byte: &u8) -> bool {
        match self {
            Self::Any | Self::One => true,
            Self::Byte(own) => own == byte,
            Self::Of { not, ranges } => {
                ranges.iter().any(|(from, to)| (from..=to).contains(&byte)) != *not
            }
        }
    }
}

fn tokenize(pattern: &[u8]) -> Vec<GlobToken> {
    let mut tokens = vec![];
    let mut rest = pattern;
    while let Some((first, more)) = rest.split_first() {
        rest = more;
        tokens.push(match first {
            b'*' => GlobToken::Any,
            b'?' => GlobToken::One,
            b'\\' => match rest.split_first() {
                Some((byte, more)) => {
                    rest = more;
                    GlobToken::Byte(*byte)
                }
                None => GlobToken::Byte(b'\\'),
            },
            b'[' => match parse_bracket_set(rest) {
                Some((token, more)) => {
                    rest = more;
                    token
                }
                None => GlobToken::Byte(b'['),
            },
            byte => GlobToken::Byte(*byte),
        });
    }
    tokens
}

/// Parses a set after its opening bracket; returns it and the rest, `None` if it does not end.
fn parse_bracket_set(text: &[u8]) -> Option<(GlobToken, &[u8])> {
    let not = matches!(text.first(), Some(b'!' | b'^'));
    let mut at = usize::from(not);
    let mut ranges = vec![];
    loop {
        let byte = *text.get(at)?;
        if byte == b']' && !ranges.is_empty() {
            return Some((GlobToken::Of { not, ranges }, text.get(at + 1..)?));
        }
        match (text.get(at + 1), text.get(at + 2)) {
            (Some(b'-'), Some(to)) if *to != b']' => {
                ranges.push((byte, *to));
                at += 3;
            }
            _ => {
                ranges.push((byte, byte));
                at += 1;
            }
        }
    }
}

/// Returns true if items match a pattern some of whose parts stand for any number of items. The
/// time is at most the product of both lengths.
fn match_with_wildcards<P, T>(
    pattern: &[P],
    items: &[T],
    any: impl Fn(&P) -> bool,
    one: impl Fn(&P, &T) -> bool,
) -> bool {
    let (mut p, mut at) = (0, 0);
    // The last wildcard, and the end of its match so far.
    let mut star = None;
    while at < items.len() {
        if pattern.get(p).is_some_and(&any) {
            star = Some((p, at));
            p += 1;
        } else if let (Some(part), Some(item)) = (pattern.get(p), items.get(at))
            && one(part, item)
        {
            (p, at) = (p + 1, at + 1);
        } else if let Some((part, reached)) = star {
            star = Some((part, reached + 1));
            (p, at) = (part + 1, reached + 1);
        } else {
            return false;
        }
    }
    pattern.get(p..).is_some_and(|rest| rest.iter().all(any))
}

/// Removes the names that match the patterns.
pub fn remove_excluded(tree: &mut Tree, patterns: &ExcludePatterns) {
    if patterns.is_empty() {
        return;
    }
    let mut dirs = vec![NodeId::ROOT];
    while let Some(dir) = dirs.pop() {
        let mut gone = vec![];
        for (name, id) in tree.names(dir) {
            let is_dir = matches!(tree.node(id).kind_data, NodeKind::Directory);
            if patterns.matches(tree, dir, name, is_dir) {
                gone.push(name.to_vec());
            } else if is_dir {
                dirs.push(id);
            }
        }
        for name in gone {
            tree.remove(dir, &name);
        }
    }
}

/// Changes every reachable node, possibly more than once.
fn for_each_node(tree: &mut Tree, mut change: impl FnMut(&mut TreeNode)) {
    let mut dirs = vec![NodeId::ROOT];
    if let Some(root) = tree.node_mut(NodeId::ROOT) {
        change(root);
    }
    while let Some(dir) = dirs.pop() {
        let ids: Vec<NodeId> = tree.names(dir).map(|(_, id)| id).collect();
        for id in ids {
            if let Some(node) = tree.node_mut(id) {
                change(node);
                if matches!(node.kind_data, NodeKind::Directory) {
                    dirs.push(id);
                }
            }
        }
    }
}

/// Sets the owner of all nodes.
pub fn set_owner(tree: &mut Tree, uid: u32, gid: u32) {
    for_each_node(tree, |node| (node.uid, node.gid) = (uid, gid));
}

/// Clears the permissions of group and others, as `genext2fs --squash-perms` does, and removes
/// access control lists.
pub fn squash_perms(tree: &mut Tree) {
    for_each_node(tree, |node| {
        if !matches!(node.kind_data, NodeKind::Symlink(_)) {
            node.mode &= 0o7700;
            node.remove_acls();
        }
    });
}

/// Returns the newest modification time.
pub fn newest_mtime(tree: &mut Tree) -> Time {
    let mut newest = Time::default();
    for_each_node(tree, |node| newest = newest.max(node.modified));
    newest
}

/// Recomputes the times for another creation time of the volume.
pub fn set_times(tree: &mut Tree, stamp: TimestampPolicy) {
    for_each_node(tree, |node| {
        let TreeNode { modified, accessed, changed, .. } = *node;
        stamp.set_times(node, modified, Some(accessed), Some(changed));
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_match_glob_patterns() {
        for (pattern, fitting, other) in [
            ("*", "anything", ""),
            ("*.o", "a.o", "a.oo"),
            ("a?c", "abc", "ac"),
            ("[a-c]x[!0-9]", "bxy", "bx7"),
            ("a*b*c", "a--b--b-c", "a--b--"),
            ("\\*", "*", "x"),
            ("[x", "[x", "x"),
            ("[]]", "]", "x"),
        ] {
            assert!(match_component(pattern.as_bytes(), fitting.as_bytes()), "{pattern} {fitting}");
            if !other.is_empty() {
                assert!(
                    !match_component(pattern.as_bytes(), other.as_bytes()),
                    "{pattern} {other}"
                );
            }
        }
        // No pattern takes exponential time.
        let (long, many) = ("a".repeat(255), "a*".repeat(100) + "b");
        assert!(!match_component(many.as_bytes(), long.as_bytes()));
    }

    #[test]
    fn exclude_removes_matching_nodes() {
        let file =
            || TreeNode::new(NodeKind::File { size_bytes: 0, data: vec![], source: 0 }, 0o644);
        let left = |patterns: &[&str]| {
            let mut tree = Tree::new(TreeNode::new(NodeKind::Directory, 0o755));
            let add = |tree: &mut Tree, dir, name: &str, node| tree.add(dir, name.as_bytes(), node);
            let a =
                add(&mut tree, NodeId::ROOT, "a", TreeNode::new(NodeKind::Directory, 0)).unwrap();
            let b = add(&mut tree, a, "b", TreeNode::new(NodeKind::Directory, 0)).unwrap();
            add(&mut tree, b, "x.o", file()).unwrap();
            add(&mut tree, a, "b.o", file()).unwrap();
            add(&mut tree, NodeId::ROOT, "x.o", file()).unwrap();
            remove_excluded(
                &mut tree,
                &ExcludePatterns::new(patterns.iter().map(|it| it.as_bytes())),
            );
            let names = |dir| tree.names(dir).count();
            (names(NodeId::ROOT), names(a), names(b))
        };
        assert_eq!(left(&[]), (2, 2, 1));
        assert_eq!(left(&["*.o"]), (1, 1, 0));
        assert_eq!(left(&["/x.o"]), (1, 2, 1));
        assert_eq!(left(&["a/*.o"]), (2, 1, 1));
        assert_eq!(left(&["a/**/x.o"]), (2, 2, 0));
        assert_eq!(left(&["**/x.o"]), (1, 2, 0));
        assert_eq!(left(&["b*/"]), (2, 1, 1));
        assert_eq!(left(&["a"]), (1, 2, 1));
    }
}
