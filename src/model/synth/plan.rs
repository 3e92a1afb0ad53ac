//! Which tensors a synthetic model has: names and shapes as a transformer's, sizes to order.
//!
//! Pure. The invariant: the tensors of a plan have the wanted number of bytes together, to the
//! byte, and none has more than 6 % of them. Sizes are uneven on purpose, by seed, and some rows
//! are odd, since it is at uneven sizes that packing and clipping go wrong.

use crate::driver::kernel::mix;
use crate::host::safetensors::{Dtype, tensor_bytes};
use crate::units::{GIB, KIB};

/// The fewest bytes that a synthetic model can have.
pub const TOTAL_BYTES_MIN: u64 = 64 * KIB;

/// A tensor to be written.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct PlannedTensor {
    pub(super) name: String,
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<usize>,
    pub(super) bytes: u64,
}

/// A matrix of a layer: name, dtype, its share of the layer, what its rows lack of `hidden`.
const LAYER_MATRICES: [(&str, Dtype, u64, usize); 8] = [
    ("self_attn.q_proj.weight", Dtype::BF16, 100, 0),
    ("self_attn.k_proj.weight", Dtype::BF16, 30, 0),
    ("self_attn.v_proj.weight", Dtype::F16, 30, 3),
    ("self_attn.o_proj.weight", Dtype::F8_E4M3, 50, 1),
    ("mlp.gate_proj.weight", Dtype::BF16, 140, 0),
    ("mlp.up_proj.weight", Dtype::F8_E5M2, 70, 0),
    ("mlp.down_proj.weight", Dtype::F4, 70, 0),
    ("mlp.down_proj.weight_scale", Dtype::F8_E8M0, 4, 0),
];

/// The small tensors of a layer take turns with these, so that every dtype occurs.
const RARE_DTYPES: [Dtype; 12] = [
    Dtype::C64,
    Dtype::F64,
    Dtype::U64,
    Dtype::U32,
    Dtype::U16,
    Dtype::I16,
    Dtype::I8,
    Dtype::F8_E4M3FNUZ,
    Dtype::F8_E5M2FNUZ,
    Dtype::F6_E2M3,
    Dtype::F6_E3M2,
    Dtype::BOOL,
];

/// Embedding and head, in thousandths of the matrices together.
const EMBEDDING_PER_MILLE: u64 = 55;

/// The tensors of a model of `total_bytes`, at least [`TOTAL_BYTES_MIN`].
pub(super) fn plan(total_bytes: u64, seed: u64) -> Vec<PlannedTensor> {
    let layers = match total_bytes {
        0..GIB => 8,
        GIB..0x4_0000_0000 => 12,
        _ => 20,
    };
    let hidden = hidden_size(total_bytes);
    let mut tensors = small_tensors(layers, hidden);
    let matrix_bytes = total_bytes - sum_bytes(&tensors);
    let embedding_bytes = share(matrix_bytes, EMBEDDING_PER_MILLE, 1000);
    tensors.push(matrix("model.embed_tokens.weight", Dtype::BF16, embedding_bytes, hidden));
    tensors.push(matrix("lm_head.weight", Dtype::BF16, embedding_bytes, hidden));

    let layers_bytes = matrix_bytes - 2 * embedding_bytes;
    let mut weights = Vec::new();
    for layer in 0..layers {
        for (index, (_, _, weight, _)) in LAYER_MATRICES.iter().enumerate() {
            // Three quarters to five quarters of the usual share.
            let jitter = mix(seed, (layer * LAYER_MATRICES.len() + index) as u64) % 512;
            weights.push(weight * (768 + jitter));
        }
    }
    let weight_sum = weights.iter().sum();
    for layer in 0..layers {
        for (index, (part, dtype, _, missing)) in LAYER_MATRICES.iter().enumerate() {
            let weight = weights[layer * LAYER_MATRICES.len() + index];
            let bytes = share(layers_bytes, weight, weight_sum);
            let name = format!("model.layers.{layer}.{part}");
            tensors.push(matrix(&name, *dtype, bytes, hidden - missing));
        }
    }
    // What rounding to whole rows left over.
    let rest = total_bytes - sum_bytes(&tensors);
    let rest = usize::try_from(rest).expect("less than a row for each tensor");
    tensors.push(planned("model.rest".to_owned(), Dtype::U8, vec![rest]));
    tensors
}

/// Norms, scales, tables: the tensors whose size does not follow the model's.
fn small_tensors(layers: usize, hidden: usize) -> Vec<PlannedTensor> {
    let mut tensors = vec![
        planned("model.norm.weight".to_owned(), Dtype::F32, vec![hidden]),
        planned("model.logit_scale".to_owned(), Dtype::F32, vec![]),
        planned("model.adapter.weight".to_owned(), Dtype::F16, vec![0, hidden]),
        planned("model.position_ids".to_owned(), Dtype::I64, vec![1, hidden]),
        planned("model.token_type_ids".to_owned(), Dtype::I32, vec![hidden]),
        planned("model.attention_mask".to_owned(), Dtype::BOOL, vec![hidden, 3]),
        planned("model.codebook".to_owned(), Dtype::U8, vec![251]),
    ];
    for layer in 0..layers {
        let name = |part: &str| format!("model.layers.{layer}.{part}");
        let rare = |turn: usize| RARE_DTYPES[(2 * layer + turn) % RARE_DTYPES.len()];
        tensors.extend([
            planned(name("input_layernorm.weight"), Dtype::F32, vec![hidden]),
            planned(name("post_attention_layernorm.weight"), Dtype::BF16, vec![hidden - 1]),
            planned(name("self_attn.o_proj.weight_scale"), Dtype::F32, vec![]),
            planned(name("self_attn.rotary_emb.inv_freq"), Dtype::F32, vec![hidden / 4]),
            planned(name("self_attn.q_proj.zero_points"), rare(0), vec![hidden]),
            planned(name("self_attn.k_proj.zero_points"), rare(1), vec![hidden]),
        ]);
    }
    tensors
}

/// As a transformer's grows: with the root of the model's size. A power of two.
fn hidden_size(total_bytes: u64) -> usize {
    let root = (total_bytes / 1024).isqrt().clamp(8, 4096);
    1 << root.ilog2()
}

fn planned(name: String, dtype: Dtype, shape: Vec<usize>) -> PlannedTensor {
    let bytes = tensor_bytes(dtype, &shape).expect("plans use whole bytes");
    PlannedTensor { name, dtype, shape, bytes }
}

/// As many rows of `columns` as fit in `bytes`.
fn matrix(name: &str, dtype: Dtype, bytes: u64, columns: usize) -> PlannedTensor {
    let row_bits = columns as u64 * dtype.bitsize() as u64;
    let rows = u128::from(bytes) * 8 / u128::from(row_bits);
    let rows = usize::try_from(rows).expect("fewer rows than bytes");
    planned(name.to_owned(), dtype, vec![rows, columns])
}

/// `part` of `whole` parts of `bytes`, rounded down.
fn share(bytes: u64, part: u64, whole: u64) -> u64 {
    let share = u128::from(bytes) * u128::from(part) / u128::from(whole);
    u64::try_from(share).expect("a part of a u64")
}

fn sum_bytes(tensors: &[PlannedTensor]) -> u64 {
    tensors.iter().map(|tensor| tensor.bytes).sum()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn plans_have_their_bytes_and_every_dtype() {
        for total in [TOTAL_BYTES_MIN, 100_003, 1 << 20, 77_777_777, GIB, 16 * GIB, 1 << 45] {
            for seed in 0..20 {
                let tensors = plan(total, seed);
                assert_eq!(sum_bytes(&tensors), total);
                assert!((100..300).contains(&tensors.len()), "{}", tensors.len());
                let names: BTreeSet<&str> = tensors.iter().map(|t| t.name.as_str()).collect();
                assert_eq!(names.len(), tensors.len());
                let dtypes: BTreeSet<Dtype> = tensors.iter().map(|t| t.dtype).collect();
                assert_eq!(dtypes.len(), 22);
                let largest = tensors.iter().map(|t| t.bytes).max().unwrap();
                assert!(largest <= total / 100 * 6, "{largest} of {total}");
                assert!(tensors.iter().any(|t| t.bytes == 0 && !t.shape.is_empty()));
                assert!(tensors.iter().any(|t| t.shape.is_empty()));
            }
        }
    }
}
