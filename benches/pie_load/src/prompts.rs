//! The prompts of the workload `drafts`.

use std::fs;
use std::path::Path;

use crate::context::prompt;
use crate::error::LoadError;

/// Hands out prompts, and counts those that it hands out again.
pub(crate) struct Prompts {
    /// Empty for random ones.
    list: Vec<Vec<u32>>,
    /// Of a random prompt.
    length: u32,
    vocabulary: u32,
    taken: usize,
}

impl Prompts {
    /// Those of a file, a JSON list of lists of token ids, or random ones of `length` tokens, of which no two are alike.
    pub(crate) fn new(
        path: Option<&Path>,
        length: u32,
        vocabulary: u32,
    ) -> Result<Self, LoadError> {
        let list = path.map(|path| read(path, vocabulary)).transpose()?;
        Ok(Self {
            list: list.unwrap_or_default(),
            length,
            vocabulary,
            taken: 0,
        })
    }

    /// The longest prompt.
    pub(crate) fn longest(&self) -> u32 {
        let longest = self.list.iter().map(Vec::len).max();
        longest.map_or(self.length, |length| length as u32)
    }

    /// The next prompts, and how many of them were handed out before. The list begins anew at its end.
    pub(crate) fn take(&mut self, count: usize) -> (Vec<Vec<u32>>, usize) {
        let first = self.taken;
        self.taken += count;
        if self.list.is_empty() {
            let ids = first as u64 + 1..=self.taken as u64;
            let random = ids.map(|id| prompt(id, self.length, self.vocabulary));
            return (random.collect(), 0);
        }
        let listed = (first..self.taken).map(|index| self.list[index % self.list.len()].clone());
        let again = self.taken - self.list.len().clamp(first, self.taken);
        (listed.collect(), again)
    }
}

fn read(path: &Path, vocabulary: u32) -> Result<Vec<Vec<u32>>, LoadError> {
    let wrong = |problem: String| LoadError::Prompts {
        path: path.to_owned(),
        problem,
    };
    let text = fs::read_to_string(path).map_err(|source| LoadError::File {
        action: "cannot read",
        path: path.to_owned(),
        source,
    })?;
    let list: Vec<Vec<u32>> =
        serde_json::from_str(&text).map_err(|error| wrong(error.to_string()))?;
    if list.is_empty() || list.iter().any(Vec::is_empty) {
        return Err(wrong("nothing to begin with".to_owned()));
    }
    match list.iter().flatten().find(|&&token| token >= vocabulary) {
        Some(token) => Err(wrong(format!("{token} is not one of {vocabulary} tokens"))),
        None => Ok(list),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_prompts_are_all_new() {
        let mut prompts = Prompts::new(None, 8, 1000).unwrap();
        let (first, again) = prompts.take(3);
        assert_eq!((prompts.longest(), again), (8, 0));
        let (second, again) = prompts.take(3);
        assert_eq!(again, 0);
        assert!(first.iter().all(|prompt| !second.contains(prompt)));
        assert!(second.iter().all(|prompt| prompt.len() == 8));
    }

    #[test]
    fn a_list_begins_anew() {
        let folder = tempfile::TempDir::new().unwrap();
        let path = folder.path().join("prompts.json");
        fs::write(&path, "[[1], [2, 3], [4]]").unwrap();
        let mut prompts = Prompts::new(Some(&path), 8, 5).unwrap();
        assert_eq!(prompts.longest(), 2);
        assert_eq!(prompts.take(2), (vec![vec![1], vec![2, 3]], 0));
        assert_eq!(prompts.take(3), (vec![vec![4], vec![1], vec![2, 3]], 2));
        assert_eq!(prompts.take(1), (vec![vec![4]], 1));
        for (text, problem) in [
            ("[1]", "invalid type"),
            ("[]", "nothing"),
            ("[[1], []]", "nothing"),
            ("[[1], [5]]", "5 is not one of 5 tokens"),
        ] {
            fs::write(&path, text).unwrap();
            let error = Prompts::new(Some(&path), 8, 5).err().unwrap().to_string();
            assert!(error.contains(problem), "{error}");
        }
    }
}
