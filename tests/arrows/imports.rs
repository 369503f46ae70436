//! Imports between the files of a crate, read from its sources, and the cycles among them.
//!
//! A file is a module. An edge is a path in code or in a `use` that names an item of another file;
//! a re-export counts for the file that defines the item. Edges between a module and its
//! descendants are left out: they are one unit that was split. Test modules are not read.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Path of a module inside its crate; empty for the root.
pub type Module = Vec<String>;

/// Files of a crate with what each imports from which other.
pub struct ImportGraph {
    files: BTreeMap<Module, String>,
    reexports: BTreeMap<(Module, String), Module>,
}

impl ImportGraph {
    /// Reads the sources below `src`.
    pub fn read(src: &Path) -> Self {
        let (mut files, mut reexports) = (BTreeMap::new(), BTreeMap::new());
        let mut stack = vec![src.to_owned()];
        while let Some(path) = stack.pop() {
            if path.is_dir() {
                stack.extend(std::fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path()));
                continue;
            }
            let within = path.strip_prefix(src).unwrap().with_extension("");
            let mut module: Module =
                within.iter().map(|part| part.to_str().unwrap().to_owned()).collect();
            let is_test = module.iter().any(|part| part == "tests" || part.ends_with("_tests"));
            if is_test || path.extension().is_none_or(|extension| extension != "rs") {
                continue;
            }
            if matches!(module.last().map(String::as_str), Some("lib" | "main")) {
                module.pop();
            }
            files.insert(
                module,
                strip_comments_and_strings(&std::fs::read_to_string(&path).unwrap()),
            );
        }
        for (module, text) in &files {
            for (statement, is_public) in use_statements(text) {
                if is_public {
                    for path in expand_use_groups(statement) {
                        let name = path.last().unwrap().clone();
                        let target = absolute_path(module, &path)
                            .unwrap_or_else(|| join_path(module, &path));
                        reexports.insert((module.clone(), name), target);
                    }
                }
            }
        }
        Self { files, reexports }
    }

    /// The file that defines what `path` names; `None` for a path outside the crate.
    fn owning_module(&self, path: &[String], depth: usize) -> Option<Module> {
        let len = (0..=path.len()).rev().find(|len| self.files.contains_key(&path[..*len]))?;
        let module = path[..len].to_vec();
        if let Some(name) = path.get(len)
            && depth < 5
            && let Some(target) = self.reexports.get(&(module.clone(), name.clone()))
            && target[..] != *path
            && let Some(owner) = self.owning_module(target, depth + 1)
        {
            return Some(owner);
        }
        Some(module)
    }

    /// Every edge, with a path that makes it.
    pub fn import_edges(&self) -> BTreeMap<&Module, BTreeMap<&Module, String>> {
        let mut edges: BTreeMap<_, BTreeMap<_, _>> = BTreeMap::new();
        for (module, text) in &self.files {
            for path in use_paths(text) {
                let target = absolute_path(module, &path).or_else(|| {
                    let child = join_path(module, &path);
                    self.files.contains_key(&child[..module.len() + 1]).then_some(child)
                });
                let Some(target) = target else { continue };
                let Some(owner) = self.owning_module(&target, 0) else { continue };
                if owner.is_empty()
                    || module.is_empty()
                    || owner.starts_with(module)
                    || module.starts_with(&owner)
                {
                    continue;
                }
                let (owner, _) = self.files.get_key_value(&owner).unwrap();
                edges.entry(module).or_default().entry(owner).or_insert(target.join("::"));
            }
        }
        edges
    }

    /// Each cycle: its files, and the imports among them.
    pub fn import_cycles(&self) -> Vec<(BTreeSet<String>, Vec<String>)> {
        let edges = self.import_edges();
        let reach = |from: &Module| {
            let (mut seen, mut stack) = (BTreeSet::new(), vec![from]);
            while let Some(at) = stack.pop() {
                for to in edges.get(at).into_iter().flat_map(BTreeMap::keys) {
                    if seen.insert(*to) {
                        stack.push(to);
                    }
                }
            }
            seen
        };
        let reached: BTreeMap<_, _> = edges.keys().map(|from| (*from, reach(from))).collect();
        let mut cycles = BTreeMap::new();
        for (from, to) in &reached {
            let cycle: BTreeSet<_> = to
                .iter()
                .filter(|to| reached.get(**to).is_some_and(|back| back.contains(from)))
                .map(|to| to.join("/"))
                .collect();
            if cycle.len() > 1 {
                cycles.entry(cycle).or_insert_with(Vec::new);
            }
        }
        for (cycle, imports) in &mut cycles {
            for (from, to) in &edges {
                for (to, path) in to {
                    let (from, to) = (from.join("/"), to.join("/"));
                    if cycle.contains(&from) && cycle.contains(&to) {
                        imports.push(format!("{from} uses {path} of {to}"));
                    }
                }
            }
        }
        cycles.into_iter().collect()
    }
}

/// The code of a file: no comments, no test module.
fn strip_comments_and_strings(text: &str) -> String {
    let text = text.split("#[cfg(test)]\nmod tests {").next().unwrap();
    text.lines().map(|line| line.split("//").next().unwrap()).collect::<Vec<_>>().join("\n")
}

/// What each `use` names, and whether it is a re-export.
fn use_statements(text: &str) -> impl Iterator<Item = (&str, bool)> {
    text.split(';').filter_map(|statement| {
        let at = statement.rfind("use ").filter(|at| {
            statement[..*at].chars().next_back().is_none_or(|before| before.is_whitespace())
        })?;
        let line = statement[..at].rsplit('\n').next().unwrap().trim();
        let is_public = line.starts_with("pub");
        (line.is_empty() || is_public).then(|| (statement[at + 4..].trim(), is_public))
    })
}

/// Every path that a file names.
fn use_paths(text: &str) -> Vec<Vec<String>> {
    let mut paths: Vec<_> =
        use_statements(text).flat_map(|(used, _)| expand_use_groups(used)).collect();
    let is_path = |c: char| c.is_alphanumeric() || c == '_' || c == ':';
    for word in text.split(|c| !is_path(c)).filter(|word| word.contains("::")) {
        let path = word.split("::").take_while(|part| !part.is_empty()).map(str::to_owned);
        let path: Vec<_> = path.collect();
        if path.first().is_some_and(|first| first.starts_with(|c: char| c.is_lowercase())) {
            paths.push(path);
        }
    }
    paths
}

/// The paths of a `use` with braces.
fn expand_use_groups(text: &str) -> Vec<Vec<String>> {
    let Some((before, rest)) = text.split_once('{') else {
        let text = text.split(" as ").next().unwrap();
        return vec![text.trim().split("::").map(|part| part.trim().to_owned()).collect()];
    };
    let inside = rest.rsplit_once('}').map_or(rest, |(inside, _)| inside);
    let (mut parts, mut depth, mut from) = (vec![], 0, 0);
    for (at, c) in inside.char_indices() {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(&inside[from..at]);
                from = at + 1;
            }
            _ => {}
        }
    }
    parts.push(&inside[from..]);
    let parts = parts.into_iter().map(str::trim).filter(|part| !part.is_empty());
    parts.flat_map(|part| expand_use_groups(&format!("{}{part}", before.trim()))).collect()
}

fn join_path(module: &Module, path: &[String]) -> Module {
    module.iter().chain(path).cloned().collect()
}

/// A path from the crate's root; `None` if it begins with the name of a crate or child.
fn absolute_path(module: &Module, path: &[String]) -> Option<Module> {
    match path.first()?.as_str() {
        "crate" => Some(path[1..].to_vec()),
        "self" => Some(join_path(module, &path[1..])),
        "super" => {
            let up = path.iter().take_while(|part| *part == "super").count();
            let parent = module[..module.len().saturating_sub(up)].to_vec();
            Some(join_path(&parent, &path[up..]))
        }
        _ => None,
    }
}
