//! Grades: the estimated probabilities of a request's drafts, in four bits each.

use std::fmt;

/// Grades of a probability; 0 stands for none.
pub(super) const GRADES: u64 = 15;
/// Drafts that have a grade of their own; later ones have that of the last.
const GRADED: usize = 16;
const BITS: usize = 4;

/// How likely the drafts of a request are, each given that those before it are right.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct Grades(u64);

impl Grades {
    /// No estimates.
    pub const NONE: Self = Self(0);

    /// Grades of drafts by the probability of each that it and all before it are right.
    pub(crate) fn new(probabilities: &[f32]) -> Self {
        let mut before = 1.0;
        let mut grades = 0;
        for (draft, &probability) in probabilities.iter().take(GRADED).enumerate() {
            let alone = (probability / before).clamp(0.0, 1.0);
            before = probability;
            let grade = 1 + (alone * (GRADES - 1) as f32).round() as u64;
            grades |= grade << (BITS * draft);
        }
        Self(grades)
    }

    /// The grade of a draft, from 1; `None` without estimates.
    pub(super) fn get(self, draft: usize) -> Option<usize> {
        let last = self.0.checked_ilog2()? as usize / BITS;
        let grade = (self.0 >> (BITS * draft.min(last))) & ((1 << BITS) - 1);
        Some(grade as usize)
    }
}

/// The middle of a grade.
pub(super) fn probability(grade: usize) -> f64 {
    (grade - 1) as f64 / (GRADES - 1) as f64
}

impl fmt::Debug for Grades {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let grades = (0..GRADED).map_while(|draft| {
            let grade = (self.0 >> (BITS * draft)) & ((1 << BITS) - 1);
            (grade > 0).then_some(grade)
        });
        f.debug_list().entries(grades).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_grade_is_the_probability_of_a_draft_alone() {
        let grades = Grades::new(&[0.5, 0.25, 0.25, 0.0]);
        let found = |draft| grades.get(draft).map(probability);
        assert_eq!(found(0), Some(0.5));
        assert_eq!(found(1), Some(0.5));
        assert_eq!(found(2), Some(1.0));
        assert_eq!(found(3), Some(0.0));
        // Later drafts have the last grade.
        assert_eq!(found(60), Some(0.0));
        assert_eq!(Grades::NONE.get(0), None);
        assert_eq!(Grades::new(&[]), Grades::NONE);
    }

    #[test]
    fn sixteen_drafts_have_grades_of_their_own() {
        let mut reached = 1.0;
        let probabilities: Vec<f32> = (0..40)
            .map(|draft| {
                reached *= if draft < 15 { 1.0 } else { 0.5 };
                reached
            })
            .collect();
        let grades = Grades::new(&probabilities);
        assert_eq!(grades.get(14).map(probability), Some(1.0));
        assert_eq!(grades.get(15).map(probability), Some(0.5));
        assert_eq!(grades.get(39).map(probability), Some(0.5));
    }
}
