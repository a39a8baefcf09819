//! Checks of staged arrays against the naive planner.

use std::collections::{HashMap, HashSet};

use pie_planner::{FieldId, SlotClass, SlotGroup, StagedGroup, StagedPass};

use super::{CLASSES, Device, check_labels};
use crate::common::naive::{Plan, Segment, Slot};

impl Device {
    pub(super) fn check_pass(&mut self, pass: &StagedPass, plan: &Plan, number: usize) {
        let staged = pass.pass();
        let segments = &plan.passes[number];
        let rows = plan.pass_rows(number);
        assert_eq!(
            (staged.tokens, staged.requests),
            (rows.len(), segments.len())
        );
        let masked = plan.requests[segments[0].request].sees.is_some();
        let single = segments.iter().all(|segment| segment.rows.len() == 1);
        assert_eq!((staged.masked, staged.decode), (masked, single && !masked));
        self.check_attention_mask(pass, plan, segments);
        let adapters = segments.iter();
        let adapters: Vec<_> = adapters
            .map(|segment| plan.requests[segment.request].adapter.unwrap_or(-1))
            .collect();
        let bound = adapters.iter().any(|&id| id != -1);
        assert_eq!(pass.adapters(), bound.then_some(adapters));

        let tokens: Vec<_> = rows.iter().map(|(row, _)| i64::from(row.token)).collect();
        assert_eq!(self.array::<i64>(FieldId::InputIds, rows.len()), tokens);
        let positions: Vec<_> = rows
            .iter()
            .map(|(row, _)| i64::from(row.position))
            .collect();
        assert_eq!(self.array::<i64>(FieldId::Positions, rows.len()), positions);
        let storage: Vec<_> = rows.iter().map(|(_, storage)| *storage).collect();
        assert_eq!(self.array::<i64>(FieldId::OutCacheLoc, rows.len()), storage);

        self.last_updates.push(staged.updates);
        let updates = self.array::<i64>(FieldId::TableUpdates, 2 * staged.updates);
        let changes = updates.chunks(2).map(|update| (update[0], update[1]));
        self.table.extend(changes);
        let row_pages = self.limits.row_pages as usize;
        let (mut start, mut sum) = (0, 0);
        let mut table_rows = HashSet::new();
        for (row, segment) in segments.iter().enumerate() {
            let request = &plan.requests[segment.request];
            let prefix = request.rows[segment.rows.start].index;
            let length = segment.rows.len();
            let all = row + 1;
            let last_i64 = |id| self.array::<i64>(id, all)[row];
            let last_i32 = |id| self.array::<i32>(id, all)[row];
            let table_row = last_i64(FieldId::ReqPoolIndices) as usize;
            assert!((1..=self.limits.max_requests as usize).contains(&table_row));
            assert!(
                table_rows.insert(table_row),
                "two requests share row {table_row}"
            );
            assert_eq!(last_i64(FieldId::SeqLens), prefix as i64 + length as i64);
            assert_eq!(last_i32(FieldId::ExtendPrefixLens), prefix as i32);
            assert_eq!(last_i32(FieldId::ExtendSeqLens), length as i32);
            assert_eq!(last_i32(FieldId::ExtendStartLoc), start);
            for (column, &page) in request.pages.iter().enumerate() {
                let entry = (table_row * row_pages + column) as i64;
                let slot = i64::from(page + 1) * i64::from(self.limits.page_size);
                assert_eq!(
                    self.table.get(&entry),
                    Some(&slot),
                    "row {row}, column {column}"
                );
            }
            start += length as i32;
            sum += prefix + length as u64;
        }
        assert_eq!(staged.seq_lens_sum, sum);
        let slots: usize = plan
            .pass_groups(number, &self.limits)
            .iter()
            .map(Vec::len)
            .sum();
        assert_eq!(staged.slots, slots);
    }

    /// Each row of the pass sees what its request's mask says of the KV that is stored by then.
    pub(super) fn check_attention_mask(
        &self,
        pass: &StagedPass,
        plan: &Plan,
        segments: &[Segment],
    ) {
        let mask = pass.attention_mask().map(|mask| {
            let offsets: Vec<usize> = mask.offsets().collect();
            // In memory that held something else.
            let mut words = vec![0x5555_5555; offsets[segments.len()]];
            mask.write(&mut words);
            (offsets, words)
        });
        let mut expected = Vec::new();
        let mut found = Vec::new();
        for (entry, segment) in segments.iter().enumerate() {
            let request = &plan.requests[segment.request];
            let Some(sees) = &request.sees else {
                assert_eq!(mask, None);
                return;
            };
            let (offsets, words) = mask.as_ref().expect("a masked pass");
            assert_eq!(offsets.len(), segments.len() + 1);
            let kv_len = request.rows[segment.rows.end - 1].index as usize + 1;
            let width = kv_len.div_ceil(32);
            for (number, row) in segment.rows.clone().enumerate() {
                let start = offsets[entry] + number * width;
                let words = &words[start..start + width];
                let bit = |index: usize| words[index / 32].cast_unsigned() >> (index % 32) & 1 == 1;
                found.push((0..32 * width).map(bit).collect::<Vec<_>>());
                let mut bits = sees[row].clone();
                assert!(!bits[kv_len..].contains(&true), "sees what is not stored");
                bits.resize(32 * width, false);
                expected.push(bits);
            }
        }
        assert_eq!(found, expected);
        let words: usize = found.iter().map(|bits| bits.len() / 32).sum();
        assert_eq!(mask.map(|(_, words)| words.len()), Some(words));
        assert!(words <= self.limits.attention_words());
    }

    pub(super) fn check_group(&mut self, open: &StagedGroup, plan: &Plan, group: &[(usize, Slot)]) {
        let staged = *open.group();
        let count = |class| group.iter().filter(|(_, slot)| slot.class == class).count();
        assert_eq!(staged.len(), group.len());
        for class in CLASSES {
            assert_eq!(staged.count(class), count(class), "{class:?}");
        }
        let rows = self.array::<i64>(FieldId::SlotRows, group.len());
        let [temperatures, top_ps, min_ps, uniforms] = [
            FieldId::Temperatures,
            FieldId::TopPs,
            FieldId::MinPs,
            FieldId::Uniforms,
        ]
        .map(|id| self.array::<f32>(id, group.len()));
        let top_ks = self.array::<i32>(FieldId::TopKs, group.len());
        for (entry, (row, slot)) in group.iter().enumerate() {
            assert_eq!(rows[entry], *row as i64, "{slot:?}");
            if slot.class <= SlotClass::Dist {
                let (staged, expected) = (temperatures[entry], slot.temperature);
                assert_eq!(staged.to_bits(), expected.to_bits(), "{slot:?}");
            }
            if matches!(
                slot.class,
                SlotClass::Filtered | SlotClass::Plain | SlotClass::Dist
            ) {
                let parameters = (top_ps[entry], min_ps[entry], top_ks[entry]);
                let expected = (slot.top_p, slot.min_p, slot.top_k as i32);
                assert_eq!(parameters, expected, "{slot:?}");
            }
            let uniform = uniforms[entry];
            assert!((0.0..1.0).contains(&uniform), "{uniform}");
            if !matches!(slot.class, SlotClass::Plain | SlotClass::Filtered) {
                assert_eq!(uniform.to_bits(), 0, "{slot:?} draws nothing");
                continue;
            }
            self.uniforms.insert((slot.request, slot.number), uniform);
            if let Some(key) = slot.key {
                let known = *self.seeded.entry(key).or_insert(uniform.to_bits());
                assert_eq!(known, uniform.to_bits(), "{key:?}");
            }
        }
        check_labels(open, group);
        self.check_masks(plan, group, staged);
    }

    /// Each slot leads to its request's mask, and a request's mask is staged once.
    pub(super) fn check_masks(&self, plan: &Plan, group: &[(usize, Slot)], staged: SlotGroup) {
        let vocab_size = self.limits.vocab_size as usize;
        let width = vocab_size.div_ceil(32);
        let words = self.array::<i32>(FieldId::MaskWords, staged.mask_words);
        let slot_masks = self.array::<i32>(FieldId::SlotMasks, 2 * group.len());
        let mut of_request = HashMap::new();
        let mut used = HashSet::new();
        for ((_, slot), entry) in group.iter().zip(slot_masks.as_chunks().0) {
            // What comes next in a prompt is known, whatever may be sampled.
            let mask = plan.requests[slot.request].mask.as_ref();
            let Some(mask) = mask.filter(|_| slot.class != SlotClass::Prompt) else {
                assert_eq!(*entry, [0, 0], "{slot:?}");
                continue;
            };
            let [first, edges] = *entry;
            used.insert(first);
            assert_eq!(*of_request.entry(slot.request).or_insert(first), first);
            let words = &words[usize::try_from(first).expect("a word")..];
            let allows = |token: usize| match usize::try_from(edges) {
                // After an odd number of edges.
                Ok(edges) => {
                    let before = words[..edges].partition_point(|&edge| edge as usize <= token);
                    before % 2 == 1
                }
                Err(_) => words[token / 32].cast_unsigned() >> (token % 32) & 1 == 1,
            };
            for token in 0..32 * width {
                let allowed = mask.get(token).copied().unwrap_or(false);
                assert_eq!(allows(token), allowed, "token {token} of {slot:?}");
            }
        }
        assert_eq!(used.len(), staged.masks, "masks without a slot");
    }
}
