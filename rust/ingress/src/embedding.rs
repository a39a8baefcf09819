//! Requests for embeddings: their validation, and the numbers of a pooled row.

use pie_engine::Capabilities;

use crate::refusal::{Refusal, within};

/// The pooled rows of an embedding model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EmbeddingInfo {
    /// Numbers of a row: the hidden size, or the labels of a classification or reward head.
    pub size: u32,
    /// Whether rows have the Euclidean norm 1.
    pub normalized: bool,
}

/// What an unvalidated request for an embedding asks for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RawEmbedding {
    /// Leading numbers of the row to return (Matryoshka); `None` for all.
    pub dimensions: Option<i64>,
}

/// How a request's pooled row becomes its embedding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PooledRow {
    /// Leading numbers to return.
    pub dimensions: u32,
    /// Whether a cut row is scaled to norm 1 again.
    pub normalized: bool,
}

impl EmbeddingInfo {
    /// Of a driver; `None` if its model generates.
    pub const fn of(caps: &Capabilities) -> Option<Self> {
        match caps.embedding_size {
            0 => None,
            size => Some(Self {
                size,
                normalized: caps.embedding_normalized,
            }),
        }
    }

    pub(crate) fn row(self, raw: RawEmbedding) -> Result<PooledRow, Refusal> {
        let dimensions = within("dimensions", raw.dimensions, 1, self.size)?;
        Ok(PooledRow {
            dimensions: dimensions.unwrap_or(self.size),
            normalized: self.normalized,
        })
    }
}

impl PooledRow {
    /// The embedding, from the words of the row.
    pub fn embedding(self, words: &[u32]) -> Vec<f32> {
        let kept = &words[..words.len().min(self.dimensions as usize)];
        let mut row: Vec<f32> = kept.iter().map(|&word| f32::from_bits(word)).collect();
        if self.normalized && kept.len() < words.len() {
            let squares: f64 = row.iter().map(|&value| f64::from(value).powi(2)).sum();
            // As in torch's `normalize`.
            let norm = squares.sqrt().max(1e-12);
            for value in &mut row {
                *value = (f64::from(*value) / norm) as f32;
            }
        }
        row
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INFO: EmbeddingInfo = EmbeddingInfo {
        size: 4,
        normalized: true,
    };

    fn words(row: &[f32]) -> Vec<u32> {
        row.iter().map(|value| value.to_bits()).collect()
    }

    #[test]
    fn a_cut_row_has_norm_1_again() {
        let row = words(&[0.3, 0.4, 0.5, 0.7]);
        let cut = INFO.row(RawEmbedding {
            dimensions: Some(2),
        });
        assert_eq!(cut.unwrap().embedding(&row), [0.6, 0.8]);
        let whole = INFO.row(RawEmbedding::default()).unwrap();
        assert_eq!(whole.embedding(&row), [0.3, 0.4, 0.5, 0.7]);
        let zeros = PooledRow {
            dimensions: 1,
            ..whole
        };
        assert_eq!(zeros.embedding(&words(&[0.0, 1.0])), [0.0]);
        let plain = PooledRow {
            dimensions: 1,
            normalized: false,
        };
        assert_eq!(plain.embedding(&row), [0.3]);
    }

    #[test]
    fn dimensions_out_of_range_are_refused() {
        for dimensions in [0, 5, -1] {
            let raw = RawEmbedding {
                dimensions: Some(dimensions),
            };
            let refusal = INFO.row(raw).unwrap_err().to_string();
            let expected = format!("dimensions is {dimensions}, it must be from 1 to 4");
            assert_eq!(refusal, expected);
        }
    }
}
